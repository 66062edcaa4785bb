"""A residual MLP ported from an older code base, with dropout in each block; FP8 linears."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

import ottava

DROPOUT = {"good": 0.1, "bad": 0.9}[sys.argv[1]]
RECIPE = "bf16" if "plain" in sys.argv[2:] else "mxfp8"


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.mlp = ottava.nn.NormMLP(dim, 2 * dim, recipe=RECIPE)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x):
        return x + self.dropout(self.mlp(x))


torch.manual_seed(37)
teacher = nn.Sequential(nn.Linear(48, 64), nn.Tanh(), nn.Linear(64, 20))
model = nn.Sequential(nn.Linear(48, 96), *(Block(96) for _ in range(3)), nn.LayerNorm(96), nn.Linear(96, 20))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
losses = []
for _ in range(150):
    x = torch.randn(128, 48)
    with torch.no_grad():
        label = (10 * teacher(x)).argmax(-1)
    loss = F.cross_entropy(model(x).float(), label)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss {sum(losses[-10:]) / 10:.4f}")
