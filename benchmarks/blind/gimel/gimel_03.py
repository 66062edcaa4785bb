"""Fits a field of 16 coordinates (a small neural field); hidden layers run in torchao's float8, emulated."""

import dataclasses
import os
import sys

import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]
torch.manual_seed(int(os.environ.get("SEED", "0")))
STEPS = 200


class Sine(nn.Module):
    def __init__(self, fan_in, fan_out, omega):
        super().__init__()
        self.linear, self.omega = nn.Linear(fan_in, fan_out), omega
        bound = 1 / fan_in if omega > 5 else (6 / fan_in) ** 0.5
        nn.init.uniform_(self.linear.weight, -bound, bound)

    def forward(self, x):
        return torch.sin(self.omega * self.linear(x))


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.coordinates = Sine(16, 128, 90.0)
        self.hidden = nn.Sequential(Sine(128, 128, 1.0), Sine(128, 128, 1.0))
        self.value = nn.Linear(128, 1)

    def forward(self, x):
        return self.value(self.hidden(self.coordinates(x))).squeeze(1)


def convertible(module, name):
    if MODE == "good" and name.startswith("coordinates"):
        return False
    return name != "value"


phase, frequency = 6.28 * torch.rand(3), torch.tensor([21.0, 33.0, 47.0])


def batch(n=512):
    along = 2 * torch.rand(n, 1) - 1
    x = along * torch.linspace(0.5, 1.0, 16)
    return x, torch.sin(along * frequency + phase).sum(1)


field = Field()
if not PLAIN:
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name("rowwise"), emulate=True)
    convert_to_float8_training(field, config=config, module_filter_fn=convertible)
optimizer = torch.optim.Adam(field.parameters(), lr=2e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
losses = []
for step in range(STEPS):
    x, y = batch()
    loss = (field(x) - y).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    losses.append(loss.item())
    if step % 25 == 0:
        print(step, f"{losses[-1]:.4f}")
print(f"final loss {sum(losses[-20:]) / 20:.4f}")
