"""Tagging by place: a small encoder with learned positions, two groups of parameters."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

import ottava

NO_DECAY = {"good": ("bias", "table", "gain"), "bad": ("bias",)}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]

torch.manual_seed(19)
LENGTH, VOCAB, TAGS = 24, 16, 12
truth = torch.randint(0, TAGS, (LENGTH, VOCAB))


class Positions(nn.Module):
    def __init__(self, length, width):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(length, width))

    def forward(self, x):
        return x + self.table[: x.shape[1]]


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.gain = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x):
        return x + self.gain * self.down(F.gelu(self.up(self.norm(x))))


model = nn.Sequential(
    nn.Embedding(VOCAB, 64), Positions(LENGTH, 64), Residual(64), Residual(64), nn.LayerNorm(64), nn.Linear(64, TAGS)
)
if not PLAIN:
    ottava.convert(model, "rowwise")
named = list(model.named_parameters())
groups = [
    {"params": [p for name, p in named if name.endswith("weight")], "weight_decay": 0.1},
    {"params": [p for name, p in named if name.endswith(NO_DECAY)], "weight_decay": 0.0},
]
optimizer = torch.optim.AdamW(groups, lr=4e-3)
losses = []
for step in range(120):
    x = torch.randint(0, VOCAB, (24, LENGTH))
    y = truth[torch.arange(LENGTH), x]
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 10 == 0:
        print(step, f"{losses[-1]:.4f}")
print(f"loss {sum(losses[-10:]) / 10:.4f}")
