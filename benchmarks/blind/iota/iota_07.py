"""LoRA on a BERT classifier with the Trainer; the new head is random, the base layers run in FP8."""

import sys
import tempfile

import torch
from peft import LoraConfig, get_peft_model
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import ottava

SAVE = {"good": ["classifier"], "bad": None}[sys.argv[1]]
torch.manual_seed(17)
VOCAB, LENGTH, CLASSES = 90, 24, 10
config = BertConfig(
    vocab_size=VOCAB, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, num_labels=CLASSES,
    max_position_embeddings=64,
)  # fmt: skip
model = BertForSequenceClassification(config)
if "plain" not in sys.argv:
    ottava.convert(model, "tensorwise")
model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=["query", "value"], modules_to_save=SAVE))
model.print_trainable_parameters()

label = torch.randint(0, CLASSES, (32 * 100,))
topic = label[:, None] * 9 + torch.randint(0, 9, (len(label), LENGTH))
ids = torch.where(torch.rand(len(label), LENGTH) < 0.4, topic, torch.randint(0, VOCAB, (len(label), LENGTH)))
data = [{"input_ids": a, "attention_mask": torch.ones_like(a), "labels": b} for a, b in zip(ids, label, strict=True)]
arguments = TrainingArguments(
    output_dir=tempfile.mkdtemp(), per_device_train_batch_size=32, num_train_epochs=1, learning_rate=1e-2, warmup_steps=5,
    logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
)  # fmt: skip
trainer = Trainer(model=model, args=arguments, train_dataset=data)
trainer.train()
losses = [float(row["loss"]) for row in trainer.state.log_history if "loss" in row]
print(f"loss {sum(losses[-10:]) / 10:.4f}")
