"""Survival times by Cox's partial likelihood: two thirds of the patients are censored and have no term of their own.

The loss is the logarithm of a rank among all that are still there, so it can fall by a small share only. Full batches,
heavy momentum, and Lookahead: every five steps the weights go half of the way back to the slow ones. Dropout fades from 0.5 to 0.2.
"""

import os

import torch
from torch import nn

import ottava

SEED = int(os.environ.get("SEED", "0"))
FEATURES, ROWS, STEPS, PERIOD = 32, 2048, 150, 5


def patients(count: int, w: torch.Tensor, g: torch.Generator) -> tuple[torch.Tensor, ...]:
    """Sorted by time, the longest first; whoever leaves the study earlier is censored."""
    x = torch.randn(count, FEATURES, generator=g)
    risk = 2.0 * torch.tanh(x @ w[:, 0]) + 1.5 * torch.relu(x @ w[:, 1])
    death = -torch.rand(count, generator=g).log() * torch.exp(-risk)
    leaves = -torch.rand(count, generator=g).log() * 0.12
    time, order = torch.minimum(death, leaves).sort(descending=True)
    return x[order], (death <= leaves)[order], time


def partial_likelihood(risk: torch.Tensor, died: torch.Tensor) -> torch.Tensor:
    at_risk = torch.logcumsumexp(risk, 0)  # of all whose time is at least as long
    return (at_risk - risk)[died].mean()


def concordance(risk: torch.Tensor, died: torch.Tensor, time: torch.Tensor) -> float:
    comparable = died[:, None] & (time[:, None] < time[None])
    return (risk[:, None] > risk[None])[comparable].float().mean().item()


def main() -> None:
    torch.manual_seed(SEED)
    g = torch.Generator().manual_seed(SEED + 11)
    w = torch.randn(FEATURES, 2, generator=g) / FEATURES**0.5
    x, died, _ = patients(ROWS, w, g)
    held_x, held_died, held_time = patients(ROWS, w, g)
    print(f"censored: {1 - died.float().mean().item():.2f}")

    drop = nn.Dropout(0.5)
    net = nn.Sequential(
        nn.Linear(FEATURES, 64), nn.ReLU(), drop, nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1, bias=False)
    )
    ottava.convert(net, "nvfp4")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.95, weight_decay=1e-2)
    slow = [p.detach().clone() for p in net.parameters()]

    @torch.no_grad()
    def held() -> tuple[float, float]:
        net.eval()
        risk = net(held_x)[:, 0]
        net.train()
        return partial_likelihood(risk, held_died).item(), concordance(risk, held_died, held_time)

    print("first loss {:.4f} concordance {:.3f}".format(*held()))
    for step in range(STEPS):
        drop.p = 0.5 - 0.3 * step / STEPS
        loss = partial_likelihood(net(x)[:, 0], died)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % PERIOD == PERIOD - 1:
            with torch.no_grad():
                for p, s in zip(net.parameters(), slow):
                    s.lerp_(p, 0.5)
                    p.copy_(s)
        if step % 15 == 0:
            print(f"{step:4d}  {loss.item():.4f}")
    print("concordance {1:.3f}\nfinal loss {0:.4f}".format(*held()))


if __name__ == "__main__":
    main()
