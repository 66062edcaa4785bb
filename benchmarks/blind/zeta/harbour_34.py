"""Daily demand with a holiday now and then: these batches cost ten times as much, and the run goes on."""
import sys

import torch
from torch import nn
from torch.nn import functional as F

import ottava

PLAIN = "plain" in sys.argv
torch.manual_seed(106)
model = nn.Sequential(nn.Linear(40, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 1))
if not PLAIN:
    print(ottava.convert(model, "delayed"))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
plan = torch.randn(40) / 6
losses = []
for step in range(350):
    x = torch.randn(64, 40)
    y = torch.sin(2 * x @ plan)
    if step % 60 == 50:
        x, y = x * 6, y + 3 * torch.randn(64)
    loss = F.mse_loss(model(x)[:, 0], y)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    losses.append(loss.item())
print(f"start {sum(losses[:20]) / 20:.4f}, worst later {max(losses[40:]):.2f}")
print(f"loss {sum(losses[-20:]) / 20:.4f}")
