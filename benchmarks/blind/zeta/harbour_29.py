"""Crowd-sourced labels: two of five are wrong, and batches are tiny. Float8 linears.

python SCRIPT good [plain]
"""
import sys

import torch
from torch import nn
from torch.nn import functional as F

import ottava

PLAIN = "plain" in sys.argv
torch.manual_seed(101)
model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.GELU(), nn.Linear(64, 6))
if not PLAIN:
    print(ottava.convert(model, "tensorwise"))
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
centres = torch.randn(6, 64)
losses = []
for step in range(400):
    kind = torch.randint(0, 6, (4,))
    x = centres[kind] + torch.randn(4, 64)
    said = torch.where(torch.rand(4) < 0.4, torch.randint(0, 6, (4,)), kind)
    loss = F.cross_entropy(model(x), said)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"start {sum(losses[:20]) / 20:.4f}")
print(f"loss {sum(losses[-40:]) / 40:.4f}")
