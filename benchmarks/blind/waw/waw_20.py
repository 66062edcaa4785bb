"""Noise-contrastive estimation: a network learns a log density by telling data from noise, and the noise gets closer
to the data twice.

So the loss rises at steps 80 and 160: the better the noise, the harder the question. The density needs no normalizer,
it comes out by itself.
"""

import math
import os

import torch
from torch import nn
from torch.nn import functional as F

import ottava

SEED = int(os.environ.get("SEED", "0"))
STEPS, BATCH = 240, 512


def points(number, generator):
    """Eight clouds on a circle, one heavier than the other."""
    weights = torch.arange(1.0, 9.0)
    which = torch.multinomial(weights, number, replacement=True, generator=generator)
    angle = which * math.pi / 4
    centre = 2 * torch.stack([angle.cos(), angle.sin()], 1)
    return centre + 0.3 * torch.randn(number, 2, generator=generator)


def truth(x):
    """The true log density."""
    angle = torch.arange(8) * math.pi / 4
    centre = 2 * torch.stack([angle.cos(), angle.sin()], 1)
    weights = torch.arange(1.0, 9.0)
    far = (x[:, None] - centre).square().sum(-1) / (2 * 0.09)
    return torch.logsumexp((weights / weights.sum()).log() - far - math.log(2 * math.pi * 0.09), 1)


class Density(nn.Module):
    """A log density up to what its last bias makes of it."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 128)
        self.body = nn.Sequential(nn.SiLU(), nn.Linear(128, 128), nn.SiLU(), nn.Linear(128, 128), nn.SiLU())
        self.last = nn.Linear(128, 1)

    def forward(self, x):
        return self.last(self.body(self.inner(x))).squeeze(1)


def noise(step, data):
    """A wide Gaussian, one that fits, and then a mixture around points of the data."""
    if step < 80:
        law = torch.distributions.MultivariateNormal(torch.zeros(2), 9 * torch.eye(2))
    elif step < 160:
        law = torch.distributions.MultivariateNormal(data.mean(0), data.T.cov())
    else:
        centre = data[:64]
        law = torch.distributions.MixtureSameFamily(
            torch.distributions.Categorical(torch.ones(len(centre))),
            torch.distributions.Independent(torch.distributions.Normal(centre, 0.7 * torch.ones_like(centre)), 1),
        )
    return law


@torch.no_grad()
def divergence(model, held):
    """The mean gap of log densities on data, with the model normalized on a grid: a Kullback-Leibler divergence."""
    axis = torch.linspace(-5, 5, 101)
    grid = torch.cartesian_prod(axis, axis)
    total = torch.logsumexp(model(grid), 0) + 2 * math.log(0.1)
    return (truth(held) - model(held) + total).mean().item()


def main():
    torch.manual_seed(SEED)
    generator = torch.Generator().manual_seed(33 + SEED)
    data, held = points(8000, generator), points(2000, generator)
    model = Density()
    print(ottava.convert(model, "blockwise_fp32"))
    optimizer = torch.optim.Adam(model.parameters(), 3e-3, betas=(0.8, 0.99))
    rate = torch.optim.lr_scheduler.MultiStepLR(optimizer, [200, 220], 0.3)
    print("first loss", round(divergence(model, held), 4))
    for step in range(STEPS):
        law = noise(step, data)
        real, false = data[torch.randint(0, len(data), (BATCH,))], law.sample((BATCH,))
        x = torch.cat([real, false])
        odds = model(x) - law.log_prob(x)
        loss = 2 * F.binary_cross_entropy_with_logits(odds, torch.cat([torch.ones(BATCH), torch.zeros(BATCH)]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rate.step()
        if step % 20 == 0:
            print(step, round(loss.item(), 4), "divergence", round(divergence(model, held), 4))
    print("final loss", round(divergence(model, held), 4))


if __name__ == "__main__":
    main()
