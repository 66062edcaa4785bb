"""Warm restarts of the learning rate with SGD: every cycle starts with a jump."""

import sys

import torch
from torch import nn

import ottava

PLAIN = "plain" in sys.argv

torch.manual_seed(25)
model = nn.Sequential(nn.Linear(48, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 12))
truth = nn.Sequential(nn.Linear(48, 64), nn.Tanh(), nn.Linear(64, 12)).requires_grad_(False)
if not PLAIN:
    ottava.convert(model, "tensorwise")
optimizer = torch.optim.SGD(model.parameters(), lr=0.4, momentum=0.9)
schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=30, eta_min=0.005)
losses = []
for step in range(156):
    x = torch.randn(64, 48)
    loss = nn.functional.cross_entropy(model(x), (truth(x) * 6).argmax(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    losses.append(loss.item())
    if step % 12 == 0:
        print(step, round(losses[-1], 4))
print(f"loss {sum(losses[-10:]) / 10:.4f}")
