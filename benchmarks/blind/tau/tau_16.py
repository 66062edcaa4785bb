"""Heavy-tailed targets (claims) with a Huber loss, ottava's delayed recipe; single batches hold catastrophes."""
import os
import sys

import torch
import torch.nn.functional as F
from torch import nn

import ottava

PLAIN, SEED = "plain" in sys.argv, int(os.environ.get("SEED", 0))
torch.manual_seed(SEED)
model = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 1))
if not PLAIN:
    print(ottava.convert(model, "delayed"))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
w = torch.randn(32, 1, generator=torch.Generator().manual_seed(4)) / 3
cauchy = torch.distributions.Cauchy(0.0, 0.15)
losses = []
for step in range(100):
    x = torch.randn(48, 32)
    y = (x @ w).abs() + cauchy.sample((48, 1))
    if torch.rand(()) < 0.04:
        y = y + 40 * torch.rand(48, 1)
    loss = F.huber_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    losses.append(loss.item())
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.4f}")
print(f"final loss {sum(losses[-10:]) / 10:.4f}")
