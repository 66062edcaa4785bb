"""A model of one's own in the Trainer, with delayed scaling: tabular features, many classes."""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from transformers import Trainer, TrainingArguments

import ottava

MARGIN = {"good": 0, "bad": -6}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]


class Table(torch.utils.data.Dataset):
    def __init__(self, count=6400, features=64, classes=24):
        generator = torch.Generator().manual_seed(2)
        self.x = torch.randn(count, features, generator=generator)
        first = torch.randn(features, 96, generator=generator) / 8
        second = torch.randn(96, classes, generator=generator)
        self.y = (torch.relu(self.x @ first) @ second).argmax(-1)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, index):
        return {"features": self.x[index], "labels": self.y[index]}


class Tabular(nn.Module):
    def __init__(self, dim=192):
        super().__init__()
        self.embed = nn.Linear(64, dim)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, dim)) for _ in range(2)
        )
        self.head = nn.Linear(dim, 24)

    def forward(self, features, labels):
        x = self.embed(features)
        for block in self.blocks:
            x = x + block(x)
        logits = self.head(x).float()
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


torch.manual_seed(0)
model = Tabular()
if not PLAIN:
    ottava.convert(model, ottava.get_recipe("delayed", margin=MARGIN))
arguments = TrainingArguments(
    "out_table", per_device_train_batch_size=64, max_steps=120, learning_rate=2e-3, warmup_steps=5, logging_steps=1,
    save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True, max_grad_norm=1.0,
)  # fmt: skip
trainer = Trainer(model, arguments, train_dataset=Table())
trainer.train()
losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
print(f"loss {sum(losses[-10:]) / 10:.4f}")
