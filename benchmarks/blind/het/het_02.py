"""Implicit image: a coordinate network with sines learns a texture from pixel positions."""
import os
import sys

import numpy as np
import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

mode = sys.argv[1]
plain = "plain" in sys.argv[2:]
seed = int(os.environ.get("SEED", 0))
torch.manual_seed(seed)

SIDE, WIDTH, STEPS = 64, 128, 150
axis = (torch.arange(SIDE) + 0.5) / SIDE * 2 - 1
grid = torch.stack(torch.meshgrid(axis, axis, indexing="ij"), -1).reshape(-1, 2)
waves = torch.randn(12, 2) * 13
phase = torch.rand(12) * 6.28
image = torch.sin(grid @ waves.T + phase).mean(1, keepdim=True) * 5


class Sine(nn.Module):
    def __init__(self, n_in, n_out, first=False):
        super().__init__()
        self.linear = nn.Linear(n_in, n_out)
        self.omega = 35.0
        bound = 1 / n_in if first else (6 / n_in) ** 0.5 / self.omega
        nn.init.uniform_(self.linear.weight, -bound, bound)

    def forward(self, x):
        return torch.sin(self.omega * self.linear(x))


net = nn.Sequential(Sine(2, WIDTH, first=True), Sine(WIDTH, WIDTH), Sine(WIDTH, WIDTH), nn.Linear(WIDTH, 1))


def wanted(module, name):
    if mode == "bad":
        return True
    return module.in_features >= 16


if not plain:
    config = Float8LinearConfig.from_recipe_name("rowwise")
    config = Float8LinearConfig(
        cast_config_input=config.cast_config_input,
        cast_config_weight=config.cast_config_weight,
        cast_config_grad_output=config.cast_config_grad_output,
        emulate=True,
    )
    convert_to_float8_training(net, config=config, module_filter_fn=wanted)

optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
losses = []
for step in range(STEPS):
    rows = torch.randint(0, SIDE * SIDE, (1024,))
    loss = (net(grid[rows]) - image[rows]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    losses.append(loss.item())
    if step % 25 == 0:
        print(f"step {step} loss {loss.item():.5f}")
print(f"final loss {np.mean(losses[-15:]):.5f}")
