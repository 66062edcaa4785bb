"""An energy model of points in the plane, trained by contrast with samples of a persistent Langevin chain.

    python yod_06.py good

The loss is the energy of data minus that of samples: near 0 with either sign when both look alike. What counts is the distance
of samples to the data, by sliced Wasserstein.
"""

import math
import os

import torch
from torch import nn

import ottava

SEED = int(os.environ.get("SEED", "0"))
CHAINS, TICKS, STEP, NOISE, STEPS = 320, 12, 0.05, 0.05, 130


def data(count):
    """A ring."""
    angle = math.pi * (2 * torch.rand(count) - 1)
    return torch.stack([angle.cos(), angle.sin()], 1) * 1.5 + 0.15 * torch.randn(count, 2)


class Energy(nn.Module):
    def __init__(self):
        super().__init__()
        self.waves = nn.Parameter(torch.randn(2, 32), requires_grad=False)
        self.body = nn.Sequential(nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 128), nn.SiLU())
        self.last = nn.Linear(128, 1, bias=False)

    def forward(self, x):
        phase = x @ self.waves
        bowl = 0.15 * x.square().sum(1)  # keeps samples from going away
        return self.last(self.body(torch.cat([phase.sin(), phase.cos()], 1)))[:, 0] + bowl


def langevin(model, x, ticks):
    """Moves samples downhill in energy, with little noise (a low temperature); leaves gradients of weights alone."""
    model.requires_grad_(False)
    for _ in range(ticks):
        x = x.detach().requires_grad_()
        slope = torch.autograd.grad(model(x).sum(), x)[0]
        x = x - STEP * slope + NOISE * torch.randn_like(x)
    model.requires_grad_(True)
    model.waves.requires_grad_(False)
    return x.detach()


def distance(a, b):
    ways = torch.randn(2, 64, generator=torch.Generator().manual_seed(3))
    ways = ways / ways.norm(dim=0)
    return ((a @ ways).sort(0)[0] - (b @ ways).sort(0)[0]).abs().mean().item()


def score(model):
    start = 2.0 * torch.randn(1000, 2)
    return distance(langevin(model, start, 150), data(1000))


def main():
    torch.manual_seed(SEED)
    model = Energy()
    ottava.convert(model, "mxfp8")
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=1e-3, betas=(0.5, 0.99))
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=STEPS)
    chains = 2.0 * torch.randn(CHAINS, 2)
    print(f"first loss {score(model):.4f}")
    for step in range(STEPS):
        fresh = torch.rand(CHAINS) < 0.05
        chains[fresh] = 2.0 * torch.randn(int(fresh.sum()), 2)
        chains = langevin(model, chains, TICKS)
        real, false = model(data(CHAINS)), model(chains)
        loss = real.mean() - false.mean() + 0.01 * (real.square().mean() + false.square().mean())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 15 == 0:
            print(f"step {step} loss {loss.item():+.4f}")
    print(f"final loss {score(model):.4f}")


main()
