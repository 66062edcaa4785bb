"""Forecasts of a series with bursts: Huber loss, clipped gradients."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

import ottava

MODE = sys.argv[1]
RECIPE = "bf16" if "plain" in sys.argv[2:] else "blockwise"

torch.manual_seed(79)
model = nn.Sequential(
    nn.Linear(48, 96), *(ottava.nn.NormMLP(96, 192, activation="swiglu", recipe=RECIPE) for _ in range(2)),
    nn.LayerNorm(96), nn.Linear(96, 12),
)  # fmt: skip
optimizer = torch.optim.RAdam(model.parameters(), lr=3e-3)
losses = []
for step in range(170):
    time = torch.arange(60) / 6 + 6.28 * torch.rand(64, 1)
    series = torch.sin(time) + 0.4 * torch.sin(3 * time) + 0.1 * torch.randn(64, 60)
    burst = torch.rand(64, 60) < (0.15 if step % 23 == 11 else 0.002)
    series = series + burst * 12 * torch.randn(64, 60)
    loss = F.huber_loss(model(series[:, :48].clamp(-6, 6)).float(), series[:, 48:])
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    losses.append(loss.item())
print(f"loss {sum(losses[-10:]) / 10:.4f}")
