"""Masked language modelling with a small BERT in the Trainer."""

import sys

import torch
from transformers import BertConfig, BertForMaskedLM, Trainer, TrainingArguments

import ottava

MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]
VOCAB, MASK = 50, 49


def rows(count=2000, length=24):
    generator = torch.Generator().manual_seed(12)
    start = torch.randint(48, (count, 1), generator=generator)
    stride = torch.randint(1, 4, (count, 1), generator=generator)
    return [{"input_ids": row} for row in (start + stride * torch.arange(length)) % 48]


def collate(rows):
    ids = torch.stack([row["input_ids"] for row in rows])
    chosen = torch.rand(ids.shape) < 0.15
    labels = torch.where(chosen, ids, -100)
    return {"input_ids": torch.where(chosen & (torch.rand(ids.shape) < 0.9), MASK, ids), "labels": labels}


torch.manual_seed(0)
config = BertConfig(
    vocab_size=VOCAB, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
    max_position_embeddings=32,
)  # fmt: skip
model = BertForMaskedLM(config)
if not PLAIN:
    ottava.convert(model, "rowwise")
arguments = TrainingArguments(
    "out_mlm", per_device_train_batch_size=24, max_steps=130, learning_rate=3e-3, warmup_steps=15,
    lr_scheduler_type="polynomial", logging_steps=1, save_strategy="no", report_to="none", use_cpu=True,
    disable_tqdm=True, remove_unused_columns=False,
)  # fmt: skip
trainer = Trainer(model, arguments, data_collator=collate, train_dataset=rows())
trainer.train()
losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
print(f"loss {sum(losses[-10:]) / 10:.4f}")
