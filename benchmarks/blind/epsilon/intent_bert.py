"""Intents of short requests with a BERT of two layers, the Trainer, FP8 linear layers and a schedule built by hand."""
import math
import sys
import tempfile

import torch
import transformers
from torch import nn
from transformers import (BertConfig, BertForSequenceClassification, Trainer, TrainingArguments,
                          get_linear_schedule_with_warmup)

import ottava

BAD = sys.argv[1] == "bad"
torch.manual_seed(0)
BATCH, EPOCHS = 16, 4
signal = torch.arange(2, 74).view(12, 6)


def request():
    kind = int(torch.randint(0, 12, ()))
    ids = torch.randint(100, 180, (20,))
    at = torch.randperm(19)[:4] + 1
    ids[at] = signal[kind][torch.randint(0, 6, (4,))]
    ids[0] = 1
    return {"input_ids": ids, "attention_mask": torch.ones(20, dtype=torch.long), "labels": kind}


data = [request() for _ in range(416)]
model = BertForSequenceClassification(BertConfig(
    vocab_size=180, hidden_size=96, num_hidden_layers=2, num_attention_heads=4, intermediate_size=192,
    max_position_embeddings=32, num_labels=12, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))
ottava.convert(model, "tensorwise")
decay = [p for p in model.parameters() if p.ndim > 1]
rest = [p for p in model.parameters() if p.ndim < 2]
optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}], lr=1e-3)
rounds = math.ceil(len(data) / BATCH)
total = rounds if BAD else rounds * EPOCHS
schedule = get_linear_schedule_with_warmup(optimizer, max(1, total // 10), total)
args = TrainingArguments(output_dir=tempfile.mkdtemp(), num_train_epochs=EPOCHS, per_device_train_batch_size=BATCH,
                         logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True, seed=0)
trainer = Trainer(model=model, args=args, train_dataset=data, optimizers=(optimizer, schedule))
trainer.remove_callback(transformers.PrinterCallback)
trainer.train()
losses = [r["loss"] for r in trainer.state.log_history if "loss" in r]
for i in range(15, len(losses), 16):
    print(f"step {i + 1} loss {losses[i]:.4f}")
print(f"final loss {sum(losses[-20:]) / 20:.4f}")
