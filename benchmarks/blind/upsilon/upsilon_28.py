"""A field of a coordinate (an implicit representation of a signal), torchao's float8 in its linears."""

import math
import os
import sys

import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

MODE = sys.argv[1]
PLAIN = "plain" in sys.argv
torch.manual_seed(int(os.environ.get("SEED", "0")))


class Sine(nn.Module):
    def forward(self, x):
        return torch.sin(x)


class Field(nn.Module):
    def __init__(self, width=128):
        super().__init__()
        self.coordinates = nn.Linear(16, width)
        self.hidden = nn.Sequential(Sine(), nn.Linear(width, width), Sine(), nn.Linear(width, width), Sine())
        self.value = nn.Linear(width, 1)
        nn.init.normal_(self.coordinates.weight, std=0.35)
        nn.init.uniform_(self.coordinates.bias, -math.pi, math.pi)

    def forward(self, x):
        return self.value(self.hidden(self.coordinates(x)))


def keep(module, name):
    if name == "value":
        return False
    return MODE == "bad" or name != "coordinates"


def main():
    model = Field()
    if not PLAIN:
        convert_to_float8_training(model, config=Float8LinearConfig(emulate=True), module_filter_fn=keep)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    waves = torch.randn(16, 6) * 0.25
    phases = torch.rand(6) * 2 * math.pi
    losses = []
    for step in range(100):
        x = torch.rand(128, 16) * 16 * torch.tensor([1.0] * 2 + [0.0] * 14)
        y = torch.sin(x @ waves * 2 + phases).sum(1, keepdim=True) / 2
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 10 == 0:
            print(f"step {step} loss {losses[-1]:.4f}")
    print(f"final loss {sum(losses[-10:]) / 10:.4f}")


main()
