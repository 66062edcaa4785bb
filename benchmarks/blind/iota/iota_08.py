"""A surrogate of a simulator (regression, BF16-free): which recipe is precise enough?"""

import sys

import torch
from torch import nn

import ottava

RECIPE = {"good": "mxfp8", "bad": "mxfp4"}[sys.argv[1]]
torch.manual_seed(29)
teacher = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 32)).requires_grad_(False)
model = nn.Sequential(
    nn.Linear(64, 256), nn.SiLU(), nn.Linear(256, 256), nn.SiLU(), nn.Linear(256, 256), nn.SiLU(), nn.Linear(256, 32)
)
if "plain" not in sys.argv:
    print(ottava.convert(model, RECIPE))
STEPS = 200
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
losses = []
for step in range(STEPS):
    x = torch.randn(256, 64)
    loss = nn.functional.mse_loss(model(x), 3 * teacher(x))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    losses.append(loss.item())
print(f"loss {sum(losses[-10:]) / 10:.4f}")
