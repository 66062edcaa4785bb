"""A smooth function of eight variables, fitted with narrow formats in every block."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

import ottava

RECIPE = {"good": "mxfp8", "bad": "mxfp4"}[sys.argv[1]]
if "plain" in sys.argv[2:]:
    RECIPE = "bf16"

torch.manual_seed(83)
frequencies = torch.randn(8, 4) / 3
model = nn.Sequential(
    nn.Linear(8, 64), *(ottava.nn.NormMLP(64, 128, recipe=RECIPE) for _ in range(3)), nn.LayerNorm(64),
    ottava.nn.Linear(64, 64, recipe=RECIPE), nn.GELU(), nn.Linear(64, 4),
)  # fmt: skip
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=150)
losses = []
for _ in range(150):
    x = torch.randn(128, 8)
    y = torch.sin(x @ frequencies)
    loss = F.mse_loss(model(x).float(), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    losses.append(loss.item())
print(f"loss {sum(losses[-10:]) / 10:.5f}")
