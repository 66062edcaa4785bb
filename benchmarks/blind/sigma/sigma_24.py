"""A coordinate network (SIREN) fits a signal; accelerate, ottava's tensorwise casts."""
import math
import os
import sys

import ottava
import torch
from accelerate import Accelerator
from torch import nn

SEED = int(os.environ.get("SEED", "0"))
MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]


class Sine(nn.Module):
    def __init__(self, fan_in, fan_out, omega, first=False):
        super().__init__()
        self.omega = omega
        self.linear = nn.Linear(fan_in, fan_out)
        bound = 1 / fan_in if first else math.sqrt(6 / fan_in) / omega
        nn.init.uniform_(self.linear.weight, -bound, bound)

    def forward(self, x):
        return torch.sin(self.omega * self.linear(x))


class Siren(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        self.net = nn.Sequential(Sine(2, width, 30, first=True), Sine(width, width, 20), Sine(width, width, 20))
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        return self.head(self.net(x)).squeeze(-1)


def picture(side=26):
    g = torch.Generator().manual_seed(SEED + 100)
    axis = torch.linspace(-1, 1, side)
    xy = torch.stack(torch.meshgrid(axis, axis, indexing="ij"), -1).reshape(-1, 2)
    waves = torch.randn(12, 2, generator=g) * 12
    phase = torch.rand(12, generator=g) * 6.28
    return xy, torch.sin(xy @ waves.t() + phase).mean(-1) * 2.5


def main():
    torch.manual_seed(SEED)
    accelerator = Accelerator(cpu=True)
    model = Siren()
    if not PLAIN:
        if MODE == "good":
            ottava.convert(model, "tensorwise")
        else:
            ottava.convert(model, "tensorwise", filter=lambda name, layer: name != "head")
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    xy, target = picture()
    losses = []
    for step in range(90):
        loss = (model(xy) - target).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 15 == 0:
            print(f"step {step} loss {loss.item():.4f}")
    print(f"final loss {sum(losses[-10:]) / 10:.4f}")


main()
