"""LoRA on a small encoder for classification with the Trainer; linears in FP8."""

import sys

import torch
from peft import LoraConfig, get_peft_model
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import ottava

SAVED = {"good": ["classifier"], "bad": None}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]


class Topics(torch.utils.data.Dataset):
    def __init__(self, count=1600, classes=12, length=16, vocab=96):
        generator = torch.Generator().manual_seed(1)
        words = torch.softmax(2.2 * torch.randn(classes, vocab, generator=generator), -1)
        self.labels = torch.randint(classes, (count,), generator=generator)
        self.ids = torch.multinomial(words[self.labels], length, replacement=True, generator=generator)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.labels[index]}


torch.manual_seed(0)
config = BertConfig(
    vocab_size=96, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
    max_position_embeddings=32, num_labels=12, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)  # fmt: skip
model = BertForSequenceClassification(config)
lora = LoraConfig(r=8, lora_alpha=16, target_modules=["query", "value", "dense"], modules_to_save=SAVED)
model = get_peft_model(model, lora)
if not PLAIN:
    ottava.convert(model, "tensorwise")
arguments = TrainingArguments(
    "out_topics", per_device_train_batch_size=32, max_steps=100, learning_rate=5e-3, lr_scheduler_type="constant",
    logging_steps=1, save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True,
)  # fmt: skip
trainer = Trainer(model, arguments, train_dataset=Topics())
trainer.train()
losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
print(f"loss {sum(losses[-10:]) / 10:.4f}")
