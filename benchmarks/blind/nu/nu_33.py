"""Warm restarts with a high first rate: the loss jumps at every restart and comes down again."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

import ottava

PLAIN = "plain" in sys.argv[2:]

torch.manual_seed(0)
net = nn.Sequential(
    nn.Linear(48, 192),
    nn.LayerNorm(192),
    nn.GELU(),
    nn.Linear(192, 192),
    nn.LayerNorm(192),
    nn.GELU(),
    nn.Linear(192, 32),
)
if not PLAIN:
    ottava.convert(net, "delayed")
optimizer = torch.optim.SGD(net.parameters(), lr=0.8, momentum=0.9)
scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=40, eta_min=1e-3)
teacher = torch.randn(48, 32)
losses = []
for _step in range(200):
    x = torch.randn(128, 48)
    loss = F.cross_entropy(net(x), (x @ teacher + torch.randn(128, 32)).argmax(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    losses.append(loss.item())
print(f"loss {sum(losses[-10:]) / 10:.4f}")
