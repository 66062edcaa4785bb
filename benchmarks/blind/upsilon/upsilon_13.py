"""Yields of plants in their own units; ottava's FP8 with one format for all."""

import os
import sys

import ottava
import torch
from torch import nn

MODE = sys.argv[1]
PLAIN = "plain" in sys.argv
torch.manual_seed(int(os.environ.get("SEED", "0")))
OUTPUTS = 64


class Plant(nn.Module):
    def __init__(self, units):
        super().__init__()
        self.inp = nn.Linear(32, 128)
        self.mid = nn.Linear(128, 128)
        self.yields = nn.Linear(128, OUTPUTS)
        self.head = nn.Identity()
        self.register_buffer("units", units)

    def forward(self, x):
        x = torch.relu(self.inp(x))
        x = torch.relu(self.mid(x))
        return self.head(self.yields(x)) * self.units


def main():
    # half of the products are counted in tons, the others in grams
    units = torch.ones(OUTPUTS)
    units[OUTPUTS // 2 :] = 1e-3
    model = Plant(units)
    if not PLAIN:
        report = ottava.convert(model, "tensorwise" if MODE == "good" else "tensorwise_e4m3", filter=lambda name, layer: True)
        print(report)
    teacher = nn.Sequential(nn.Linear(32, 24), nn.Tanh(), nn.Linear(24, OUTPUTS)).requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, eps=1e-15)
    scores = []
    for step in range(100):
        x = torch.randn(64, 32)
        y = 3 * teacher(x) * units
        out = model(x)
        loss = (out - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scores.append(((out - y) / units).square().mean().item())
        if step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f} relative {scores[-1]:.4f}")
    print(f"final loss {sum(scores[-10:]) / 10:.4f}")


main()
