"""Scheduled sampling: a recurrent forecaster is fed true values at first and ever more of its own, with the graph kept.

So the training loss rises in the middle of the run while free-running forecasts get better. The optimizer is NAdam.
"""

import math
import os

import torch
from torch import nn

import ottava

SEED = int(os.environ.get("SEED", "0"))
SERIES, WARM, AHEAD, STEPS = 4, 12, 16, 180


class Cell(nn.Module):
    """A GRU of two linears, so that both run under the recipe."""

    def __init__(self, inputs, width):
        super().__init__()
        self.gates = nn.Linear(inputs + width, 2 * width)
        self.new = nn.Linear(inputs + width, width)

    def forward(self, x, h):
        reset, keep = self.gates(torch.cat([x, h], -1)).sigmoid().chunk(2, -1)
        return keep * h + (1 - keep) * self.new(torch.cat([x, reset * h], -1)).tanh()


class Forecaster(nn.Module):
    """Predicts the change to the next tick."""

    def __init__(self, width=96):
        super().__init__()
        self.width = width
        self.embed = nn.Linear(SERIES, 32)
        self.cell = Cell(32, width)
        self.out = nn.Linear(width, SERIES)

    def forward(self, series, own):
        """`own` is the chance that a value behind the warm-up is the forecast and not the truth."""
        h, x, made = series.new_zeros(len(series), self.width), series[:, 0], []
        for tick in range(series.shape[1] - 1):
            h = self.cell(self.embed(x).relu(), h)
            forecast = x + self.out(h)
            made.append(forecast)
            x = series[:, tick + 1]
            if tick + 1 >= WARM:
                mine = torch.rand(len(series), 1) < own
                x = torch.where(mine, forecast, x)
        return torch.stack(made, 1)


def waves(number, generator):
    """Four coupled waves with a common speed of each row."""
    t = torch.arange(WARM + AHEAD + 1)[None, :, None] * 0.25
    speed = 0.7 + 0.6 * torch.rand(number, 1, 1, generator=generator)
    phase = 2 * math.pi * torch.rand(number, 1, 1, generator=generator)
    ratio = torch.tensor([1.0, 2.0, 0.5, 1.5])
    return torch.sin(speed * t * ratio + phase * ratio) + 0.02 * torch.randn(number, t.shape[1], SERIES, generator=generator)


@torch.no_grad()
def evaluate(model, series):
    """Squared error of forecasts that run freely."""
    model.eval()
    loss = (model(series, own=1.0) - series[:, 1:])[:, WARM:].square().mean().item()
    model.train()
    return loss


def main():
    torch.manual_seed(SEED)
    generator = torch.Generator().manual_seed(8 + SEED)
    train, held = waves(1500, generator), waves(200, generator)
    model = Forecaster()
    print(ottava.convert(model, "rowwise_with_gw_hp"))
    optimizer = torch.optim.NAdam(model.parameters(), 3e-3)
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    print("first loss", round(evaluate(model, held), 4))
    for step in range(STEPS):
        series = train[torch.randint(0, len(train), (32,))]
        own = min(1.0, max(0.0, (step - 40) / 80))
        loss = (model(series, own) - series[:, 1:]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
        if step % 30 == 0:
            print(step, "own", own, "loss", round(loss.item(), 5), "free", round(evaluate(model, held), 5))
    print("final loss", round(evaluate(model, held), 4))


if __name__ == "__main__":
    main()
