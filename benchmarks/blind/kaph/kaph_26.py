"""Consistency training of points in the plane: the number of noise levels doubles three times during the run.

A network maps a noisy point to a clean one in a single step; neighbouring levels have to agree. Differences
are divided by those of the levels, so the loss does not fall while samples get better. An average of the weights is used.
"""

import copy
import os

import torch
from torch import Tensor, nn

SEED = int(os.environ.get("SEED", "0"))
LOW, HIGH, DATA, STEPS = 0.02, 4.0, 0.5, 280
LEVELS = [8, 16, 32, 64]


def points(count: int, g: torch.Generator) -> Tensor:
    """Two half moons, brought to a deviation of about a half."""
    angle = torch.pi * torch.rand(count, generator=g)
    upper = torch.rand(count, generator=g) < 0.5
    x = torch.where(upper, angle.cos(), 1 - angle.cos()) - 0.5
    y = torch.where(upper, angle.sin(), 0.5 - angle.sin()) - 0.25
    return 0.6 * torch.stack([x, y], 1) + 0.02 * torch.randn(count, 2, generator=g)


def cast(x: Tensor, kind: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    scale = torch.exp2((torch.finfo(kind).max / x.detach().abs().amax().clamp(min=1e-12)).log2().floor())
    return x + ((x.detach() * scale).to(kind).to(x.dtype) / scale - x.detach())


class Linear8(nn.Linear):
    """Rounds its input and weight to E4M3, forward only."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(cast(x), cast(self.weight), self.bias)


class Consistency(nn.Module):
    """skip(t) x + out(t) F(x, t), which is x itself at the lowest level."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(2 + 16, 128), nn.SiLU(), Linear8(128, 128), nn.SiLU(), Linear8(128, 128), nn.SiLU(), nn.Linear(128, 2)
        )

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        t = t[:, None]
        skip = DATA**2 / ((t - LOW).square() + DATA**2)
        out = DATA * (t - LOW) / (DATA**2 + t.square()).sqrt()
        waves = 0.25 * t.log() * torch.exp2(torch.arange(8.0))
        inside = torch.cat([x / (t.square() + DATA**2).sqrt(), waves.sin(), waves.cos()], 1)
        return skip * x + out * self.net(inside)


def levels(count: int) -> Tensor:
    """Karras's levels with rho = 7."""
    ramp = torch.linspace(0, 1, count)
    return (LOW ** (1 / 7) + ramp * (HIGH ** (1 / 7) - LOW ** (1 / 7))) ** 7


@torch.no_grad()
def sliced_distance(model: Consistency) -> float:
    """Between 2,000 samples by one step from pure noise and 2,000 points."""
    g = torch.Generator().manual_seed(5)
    samples = model(HIGH * torch.randn(2000, 2, generator=g), torch.full((2000,), HIGH))
    angle = torch.pi * torch.arange(32) / 32
    lines = torch.stack([angle.cos(), angle.sin()])
    return float(((samples @ lines).sort(0).values - (points(2000, g) @ lines).sort(0).values).abs().mean())


def main() -> None:
    torch.manual_seed(SEED)
    g = torch.Generator().manual_seed(SEED + 1)
    model = Consistency()
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.RAdam(model.parameters(), 1e-3)
    print(f"first loss {sliced_distance(model):.4f}")
    for step in range(STEPS):
        t = levels(LEVELS[min(step * 4 // STEPS, 3)])
        x, noise = points(512, g), torch.randn(512, 2, generator=g)
        at = torch.randint(len(t) - 1, (512,), generator=g)
        upper = model(x + t[at + 1, None] * noise, t[at + 1])
        with torch.no_grad():
            lower = model(x + t[at, None] * noise, t[at])
        weight = 1.0 / (t[at + 1] - t[at])
        gap = ((upper - lower).square().sum(1) + 1e-6).sqrt() - 1e-3
        loss = (weight * gap).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for kept, new in zip(average.parameters(), model.parameters(), strict=True):
                kept.lerp_(new, 0.03)
        if step % 20 == 0:
            print(f"step {step} levels {len(t)} loss {loss.item():.4f}")
    print(f"final loss {sliced_distance(average):.4f}")


if __name__ == "__main__":
    main()
