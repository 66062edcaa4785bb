"""A surrogate of a smooth physical law, every layer under one recipe."""

import sys

import torch
from torch import nn

import ottava

RECIPE = {"good": "rowwise", "bad": "mxfp4"}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]

torch.manual_seed(7)
frequencies = torch.randn(6, 32)
weights = torch.randn(32, 32) / 6


def law(x):
    return torch.sin(x @ frequencies * 0.5) @ weights


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


model = nn.Sequential(nn.Linear(6, 128), Block(128), Block(128), nn.Linear(128, 32))
if not PLAIN:
    print(ottava.convert(model, RECIPE))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 160)
losses = []
for step in range(160):
    x = torch.randn(128, 6)
    loss = (model(x) - law(x)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    losses.append(loss.item())
    if step % 10 == 0:
        print(step, f"{losses[-1]:.4f}")
print(f"loss {sum(losses[-10:]) / 10:.4f}")
