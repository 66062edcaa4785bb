"""A frozen encoder under FP8 and a linear probe on it."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

import ottava

PLAIN = "plain" in sys.argv[2:]
torch.manual_seed(36)
encoder = nn.Sequential(nn.Linear(40, 192), nn.ReLU(), nn.Linear(192, 192), nn.ReLU(), nn.LayerNorm(192))
encoder.requires_grad_(False)
probe = nn.Linear(192, 12)
model = nn.Sequential(encoder, probe)
if not PLAIN:
    ottava.convert(encoder, "tensorwise")
centres = torch.randn(12, 40)
optimizer = torch.optim.AdamW(probe.parameters(), lr=5e-3)
losses = []
for step in range(120):
    y = torch.randint(0, 12, (64,))
    x = centres[y] + 2.2 * torch.randn(64, 40)
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 10 == 0:
        print(step, f"{losses[-1]:.4f}")
print(f"loss {sum(losses[-10:]) / 10:.4f}")
