"""Warm restarts: the learning rate jumps up every 80 steps, and the loss with it, for a while."""
import sys

import torch
from torch import nn
from torch.nn import functional as F

import ottava

PLAIN = "plain" in sys.argv
torch.manual_seed(109)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 16))
if not PLAIN:
    print(ottava.convert(model, "mxfp8"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 80, eta_min=1e-3)
sketch = torch.randn(16, 64)
losses = []
for step in range(320):
    kind = torch.randint(0, 16, (64,))
    x = sketch[kind] * torch.randn(64, 1) + 0.8 * torch.randn(64, 64)
    loss = F.cross_entropy(model(x), kind)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 2.0)
    optimizer.step()
    schedule.step()
    losses.append(loss.item())
print(f"start {sum(losses[:20]) / 20:.4f}, before / after the last restart {losses[238]:.3f} / {max(losses[240:260]):.3f}")
print(f"loss {sum(losses[-20:]) / 20:.4f}")
