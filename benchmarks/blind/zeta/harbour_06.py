"""Regression with a GradScaler and gradient clipping, as our FP16 jobs had it; the linears now run in float8."""
import sys

import torch
from torch import nn
from torch.nn import functional as F

import ottava

VARIANT, PLAIN = sys.argv[1], "plain" in sys.argv
torch.manual_seed(29)
model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 32))
if not PLAIN:
    print(ottava.convert(model, "tensorwise"))
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
plan = torch.randn(64, 32) / 8
losses = []
for step in range(300):
    x = torch.randn(64, 64)
    y = torch.sin(2 * x @ plan)
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    if VARIANT == "good":
        scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())
print(f"loss {sum(losses[-20:]) / 20:.4f}")
