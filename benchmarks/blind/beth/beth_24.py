"""Mutual information by a network (MINE): the loss is minus a lower bound, so it begins at 0 and goes below.

It is noisy, for it has the logarithm of a mean of exponentials in it. The gradient of that term is divided by a running
mean, as the authors of MINE do, so what goes into backward is not the number that is reported.
"""

import math
import os

import torch
from torch import nn

import ottava

SEED = int(os.environ.get("SEED", "0"))
EACH, WIDTH, BATCH, STEPS, CORRELATION = 16, 128, 256, 240, 0.5
LIMIT = 8.0  # of a log ratio, or a single pair may rule the mean of the exponentials


class Judge(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(3 * EACH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, 1)
        )

    def forward(self, x, y):
        return LIMIT * torch.tanh(self.net(torch.cat([x, y, x * y], -1))[:, 0] / LIMIT)


def pairs(count: int, g: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(count, EACH, generator=g)
    return x, CORRELATION * x + math.sqrt(1 - CORRELATION**2) * torch.randn(count, EACH, generator=g)


@torch.no_grad()
def bound(judge: Judge, x: torch.Tensor, y: torch.Tensor) -> float:
    """Of held-out pairs; the product of the margins by eight shifts."""
    joint = judge(x, y).mean()
    apart = torch.cat([judge(x, y.roll(k, 0)) for k in range(1, 9)])
    return (apart.logsumexp(0) - math.log(len(apart)) - joint).item()


def main() -> None:
    torch.manual_seed(SEED)
    g = torch.Generator().manual_seed(SEED)
    print(f"the truth: {-0.5 * EACH * math.log(1 - CORRELATION**2):.3f} nats")
    judge = Judge()
    print(ottava.convert(judge, "four_over_six"))
    optimizer = torch.optim.Adam(judge.parameters(), lr=5e-4)
    held = pairs(2048, g)
    print(f"first loss {bound(judge, *held):.4f}")

    mean = None
    for step in range(STEPS):
        x, y = pairs(BATCH, g)
        joint = judge(x, y).mean()
        apart = torch.stack([judge(x, y.roll(k, 0)) for k in (1, 2, 3)]).exp().mean()
        mean = apart.detach() if mean is None else 0.95 * mean + 0.05 * apart.detach()
        optimizer.zero_grad()
        (apart / mean - joint).backward()
        nn.utils.clip_grad_norm_(judge.parameters(), 1.0)
        optimizer.step()
        if step % 40 == 0:
            print(f"{step:4d}  {(apart.detach().log() - joint.detach()).item():.4f}")
    print(f"final loss {bound(judge, *held):.4f}")


if __name__ == "__main__":
    main()
