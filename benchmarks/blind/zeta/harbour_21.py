"""Parity of three hidden bits among thirty-two: nothing happens for long, then it clicks."""
import sys

import torch
from torch import nn
from torch.nn import functional as F

import ottava

PLAIN = "plain" in sys.argv
torch.manual_seed(102)
model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 32), nn.ReLU(), nn.Linear(32, 1))
if not PLAIN:
    print(ottava.convert(model, "rowwise"))
optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, weight_decay=0.1)
losses = []
for step in range(450):
    bits = torch.randint(0, 2, (128, 32)).float() * 2 - 1
    odd = (bits[:, 3] * bits[:, 17] * bits[:, 21] > 0).float()
    loss = F.binary_cross_entropy_with_logits(model(bits)[:, 0], odd)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"start {sum(losses[:20]) / 20:.4f}, step 150 {sum(losses[140:160]) / 20:.4f}")
print(f"loss {sum(losses[-20:]) / 20:.4f}")
