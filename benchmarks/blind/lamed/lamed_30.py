"""Fits a sine network to an image given by a formula: coordinates in, grey values out."""
import dataclasses
import os
import sys

import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

MODE, PLAIN = sys.argv[1], "plain" in sys.argv
SEED = int(os.environ.get("SEED", 0))
STEPS, BATCH, WIDTH, OMEGA = 160, 1024, 96, 20.0
torch.manual_seed(SEED)


class Sine(nn.Module):
    def __init__(self, n_in, n_out, first=False):
        super().__init__()
        self.linear = nn.Linear(n_in, n_out)
        bound = 1 / n_in if first else (6 / n_in) ** 0.5 / OMEGA
        nn.init.uniform_(self.linear.weight, -bound, bound)

    def forward(self, x):
        return torch.sin(OMEGA * self.linear(x))


class Siren(nn.Module):
    def __init__(self):
        super().__init__()
        self.coords = Sine(2, WIDTH, first=True)
        self.body = nn.Sequential(Sine(WIDTH, WIDTH), Sine(WIDTH, WIDTH))
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, xy):
        return self.out(self.body(self.coords(xy)))


def picture(xy, waves, phases, sizes):
    return (sizes * torch.sin(xy @ waves.T + phases)).sum(1, keepdim=True)


def wanted(module, name):
    if not isinstance(module, nn.Linear) or name == "out":
        return False
    return name != "coords.linear" if MODE == "good" else True


waves = torch.randn(12, 2) * 9
phases = torch.rand(12) * 6.28
sizes = torch.rand(12) * 0.5
model = Siren()
if not PLAIN:
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name("tensorwise"), emulate=True)
    convert_to_float8_training(model, config=config, module_filter_fn=wanted)

optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS, 1e-4)
losses = []
for step in range(STEPS):
    xy = torch.rand(BATCH, 2) * 2 - 1
    loss = nn.functional.mse_loss(model(xy), picture(xy, waves, phases, sizes))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    losses.append(loss.item())
    if step % 20 == 0:
        print(f"step {step} loss {losses[-1]:.4f}")
print(f"final loss {sum(losses[-15:]) / 15:.4f}")
