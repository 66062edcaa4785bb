"""A Bayesian network by cyclical stochastic-gradient Hamiltonian Monte Carlo.

The loss is the negative log posterior of all the data, so it is in the thousands. Each cycle starts with a large rate
again, and in its last steps noise is added to the weights so that they wander; the predictions of these weights are
averaged. The final loss is the negative log likelihood of the average on held-out rows.
"""

import math
import os

import torch
from torch import nn

SEED = int(os.environ.get("SEED", "0"))
ROWS, INPUT, BATCH, CYCLES, CYCLE = 1200, 12, 100, 5, 60
SPREAD, PRIOR = 0.3, 1.0


def targets(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.sin(1.5 * x @ w[:, 0]) + 0.5 * (x @ w[:, 1]) * (x @ w[:, 2])


def log_likelihood(prediction: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return -0.5 * ((y - prediction) / SPREAD).square() - math.log(SPREAD * math.sqrt(2 * math.pi))


def mixture_loss(predictions: list[torch.Tensor], y: torch.Tensor) -> float:
    """Of the mean of the predicted densities."""
    each = torch.stack([log_likelihood(p, y) for p in predictions])
    return -(each.logsumexp(0) - math.log(len(predictions))).mean().item()


def main() -> None:
    torch.manual_seed(SEED)
    g = torch.Generator().manual_seed(SEED + 77)
    w = torch.randn(INPUT, 3, generator=g) / math.sqrt(INPUT)
    x = torch.randn(ROWS + 400, INPUT, generator=g)
    y = targets(x, w) + SPREAD * torch.randn(len(x), generator=g)
    x, held_x, y, held_y = x[:ROWS], x[ROWS:], y[:ROWS], y[ROWS:]

    net = nn.Sequential(nn.Linear(INPUT, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    momentum = [torch.zeros_like(p) for p in net.parameters()]
    samples: list[torch.Tensor] = []
    with torch.no_grad():
        print(f"first loss {mixture_loss([net(held_x)[:, 0]], held_y):.4f}")

    friction = 0.1
    for step in range(CYCLES * CYCLE):
        at = step % CYCLE / CYCLE
        rate = 2e-5 * 0.5 * (1 + math.cos(math.pi * at)) + 1e-7
        pick = torch.randint(0, ROWS, (BATCH,), generator=g)
        fit = log_likelihood(net(x[pick])[:, 0], y[pick]).mean() * ROWS
        prior = sum(p.square().sum() for p in net.parameters()) / (2 * PRIOR**2)
        loss = prior - fit
        net.zero_grad()
        loss.backward()
        with torch.no_grad():
            for p, m in zip(net.parameters(), momentum):
                m.mul_(1 - friction).sub_(p.grad, alpha=rate)
                if at > 0.7:
                    m.add_(torch.randn(p.shape, generator=g), alpha=math.sqrt(2 * friction * rate))
                p.add_(m)
            if at > 0.7 and step % 3 == 0:
                samples.append(net(held_x)[:, 0])
        if step % 30 == 0:
            print(f"{step:4d}  rate {rate:.1e}  {loss.item():.1f}")
    print(f"{len(samples)} samples")
    print(f"final loss {mixture_loss(samples, held_y):.4f}")


if __name__ == "__main__":
    main()
