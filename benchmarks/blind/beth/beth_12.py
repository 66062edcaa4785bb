"""MAML on sine waves: the loss of a step is that of new tasks after inner steps, with second derivatives.

The tasks of a step are drawn anew, so its loss swings by a factor of several: a wave of size 5 costs 25 times one of 1.
"""

import os

import torch
from torch import nn
from torch.func import functional_call

SEED = int(os.environ.get("SEED", "0"))
STEPS, TASKS, SHOTS, INNER_RATE = 300, 6, 10, 0.02


def tasks(count: int, g: torch.Generator) -> list[tuple[torch.Tensor, ...]]:
    made = []
    for _ in range(count):
        size, phase = 1 + 4 * torch.rand(1, generator=g), torch.pi * torch.rand(1, generator=g)
        x = 10 * torch.rand(2 * SHOTS, 1, generator=g) - 5
        y = size * torch.sin(x + phase)
        made.append((x[:SHOTS], y[:SHOTS], x[SHOTS:], y[SHOTS:]))
    return made


def adapt(net: nn.Module, weights: dict, x: torch.Tensor, y: torch.Tensor, steps: int, higher: bool) -> dict:
    """Inner steps of plain gradient descent; with `higher` one can differentiate through them."""
    for _ in range(steps):
        loss = (functional_call(net, weights, (x,)) - y).square().mean()
        grads = torch.autograd.grad(loss, list(weights.values()), create_graph=higher)
        weights = {name: w - INNER_RATE * d for (name, w), d in zip(weights.items(), grads)}
    return weights


def query_loss(net: nn.Module, batch: list, steps: int, higher: bool) -> torch.Tensor:
    start = dict(net.named_parameters())
    total = 0.0
    for x, y, new_x, new_y in batch:
        weights = adapt(net, start, x, y, steps, higher)
        total = total + (functional_call(net, weights, (new_x,)) - new_y).square().mean()
    return total / len(batch)


def main() -> None:
    torch.manual_seed(SEED)
    g = torch.Generator().manual_seed(SEED)
    net = nn.Sequential(nn.Linear(1, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=4e-3)
    held = tasks(100, g)

    print(f"first loss {query_loss(net, held, 3, False).item():.4f}")
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = query_loss(net, tasks(TASKS, g), 2, True)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 10.0)
        optimizer.step()
        if step % 50 == 0:
            print(f"{step:4d}  {loss.item():.4f}")
    print(f"final loss {query_loss(net, held, 3, False).item():.4f}")


if __name__ == "__main__":
    main()
