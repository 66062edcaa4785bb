"""Curriculum: sums of more and more numbers, a new stage every 30 steps."""

import sys

import torch
from torch import nn

import ottava

PLAIN = "plain" in sys.argv
STAGES = [(2, 1.0), (4, 1.0), (8, 2.0), (12, 3.0), (16, 4.0)]


class Summer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(16, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 32))
        self.out = nn.Linear(32, 1)

    def forward(self, x):
        return self.out(self.inner(x)).squeeze(-1)


torch.manual_seed(5)
model = Summer()
if not PLAIN:
    ottava.convert(model, "tensorwise", filter=lambda name, layer: name.startswith("inner") and layer.in_features > 16)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
losses = []
for step in range(150):
    count, spread = STAGES[step // 30]
    x = torch.zeros(128, 16)
    x[:, :count] = torch.randn(128, count) * spread
    target = torch.sin(x).sum(1) + 0.1 * x.square().sum(1).sqrt()
    loss = nn.functional.smooth_l1_loss(model(x), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 15 == 0:
        print(step, round(losses[-1], 4))
print(f"loss {sum(losses[-10:]) / 10:.4f}")
