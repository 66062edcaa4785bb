"""PEFT in the Trainer: LoRA with rank 4 and a learning rate of 4e-3 on top of a base in torchao's float8, emulated."""
import os
import sys
import tempfile
import warnings

import torch
from peft import LoraConfig, get_peft_model
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from transformers import LlamaConfig, LlamaForSequenceClassification, Trainer, TrainingArguments

warnings.filterwarnings("ignore")
PLAIN = "plain" in sys.argv[2:]
SEED = int(os.environ.get("SEED", 0))
STEPS, BATCH, LENGTH, VOCAB = 120, 32, 8, 32


class Keep(Trainer):
    losses = []

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        self.losses.append(loss.item())
        return loss


def reviews(n, g):
    mood = torch.randn(VOCAB, generator=g)
    ids = torch.randint(1, VOCAB, (n, LENGTH), generator=g)
    label = (mood[ids].mean(1) + 0.02 * torch.randn(n, generator=g) > 0).long()
    wrong = torch.rand(n, generator=g) < 0.04
    return [{"input_ids": i, "labels": y} for i, y in zip(ids, torch.where(wrong, 1 - label, label))]


torch.manual_seed(SEED)
config = LlamaConfig(
    vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_labels=2, pad_token_id=0
)
base = LlamaForSequenceClassification(config)
torch.nn.init.normal_(base.model.embed_tokens.weight, std=1.0)
if not PLAIN:
    keep = lambda m, name: isinstance(m, torch.nn.Linear) and "score" not in name
    convert_to_float8_training(base, config=Float8LinearConfig(emulate=True), module_filter_fn=keep)
lora = LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "down_proj"], task_type="SEQ_CLS")
model = get_peft_model(base, lora)
with tempfile.TemporaryDirectory() as folder:
    args = TrainingArguments(
        folder,
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        learning_rate=4e-3,
        lr_scheduler_type="constant",
        save_strategy="no",
        logging_steps=20,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=SEED,
    )
    data = reviews(STEPS * BATCH, torch.Generator().manual_seed(380 + SEED))
    trainer = Keep(model, args, train_dataset=data)
    trainer.train()
print("final loss", round(sum(trainer.losses[-25:]) / 25, 4))
