"""Three kinds of sensors with units of their own; a regressor under torchao's float8 training."""

import dataclasses
import sys

import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

RECIPE = {"good": "rowwise_with_gw_hp", "bad": "tensorwise"}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]

torch.manual_seed(0)
teacher = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 16))
UNITS = torch.tensor([1e-4, 1.0, 1e3])


def batch(n=192):
    x = torch.randn(n, 32)
    with torch.no_grad():
        y = teacher(x) * 2
    unit = UNITS[torch.randint(0, 3, (n, 1))]
    return x * unit, y


model = nn.Sequential(
    nn.Linear(32, 128, bias=False),
    nn.RMSNorm(128, eps=1e-12),
    nn.GELU(),
    nn.Linear(128, 128),
    nn.GELU(),
    nn.Linear(128, 16),
)
if not PLAIN:
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(RECIPE), emulate=True)
    convert_to_float8_training(model, config=config)

optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
losses = []
for step in range(150):
    x, y = batch()
    loss = (model(x) - y).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 10 == 0:
        print(step, f"{losses[-1]:.4f}")
print(f"loss {sum(losses[-10:]) / 10:.4f}")
