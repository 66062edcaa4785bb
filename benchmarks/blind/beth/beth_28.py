"""FixMatch: 80 rows have a label, 4,000 have none. The term of the unlabelled rows is 0 at first and grows.

Only rows of which the network is sure count, and there are none in the beginning. The more there are, the higher is that
term, while the error on held-out rows falls. Lion's sign steps; the mean of the weights is evaluated. Hidden linears are
cast by hand to E4M3, one scale a tensor.
"""

import os
from copy import deepcopy

import torch
from torch import nn
from torch.nn import functional as F

SEED = int(os.environ.get("SEED", "0"))
INPUT, WIDTH, CLASSES, STEPS, SURE = 48, 96, 8, 250, 0.9


class Cast(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        scale = x.abs().amax().clamp(min=1e-12) / 448
        return (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale

    @staticmethod
    def backward(ctx, grad):
        return grad


class Linear8(nn.Linear):
    def forward(self, x):
        return F.linear(Cast.apply(x), Cast.apply(self.weight), self.bias)


class Lion(torch.optim.Optimizer):
    def __init__(self, parameters, lr: float, betas=(0.9, 0.99), weight_decay: float = 0.0) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(torch.lerp(p.grad, m, first).sign(), alpha=-group["lr"])
                m.lerp_(p.grad, 1 - second)


def weak(x: torch.Tensor) -> torch.Tensor:
    return x + 0.1 * torch.randn_like(x)


def strong(x: torch.Tensor) -> torch.Tensor:
    keep = (torch.rand_like(x) < 0.75).float()
    return (x + 0.4 * torch.randn_like(x)) * keep


def main() -> None:
    torch.manual_seed(SEED)
    g = torch.Generator().manual_seed(SEED)
    centres = 0.75 * torch.randn(CLASSES, INPUT, generator=g)

    def draw(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.arange(count) % CLASSES
        return centres[y] + torch.randn(count, INPUT, generator=g), y

    (x, y), (free, _), (held_x, held_y) = draw(80), draw(4000), draw(800)
    net = nn.Sequential(
        Linear8(INPUT, WIDTH), nn.LeakyReLU(0.1), Linear8(WIDTH, WIDTH), nn.LeakyReLU(0.1), nn.Linear(WIDTH, CLASSES)
    )
    mean = deepcopy(net).requires_grad_(False)
    optimizer = Lion(net.parameters(), lr=3e-4, weight_decay=0.1)

    @torch.no_grad()
    def held() -> float:
        return F.cross_entropy(mean(held_x), held_y).item()

    print(f"first loss {held():.4f}")
    for step in range(STEPS):
        own = torch.randint(0, len(x), (32,), generator=g)
        some = free[torch.randint(0, len(free), (160,), generator=g)]
        with torch.no_grad():
            chance, guess = net(weak(some)).softmax(-1).max(-1)
            counts = (chance > SURE).float()
        labelled = F.cross_entropy(net(weak(x[own])), y[own])
        unlabelled = (F.cross_entropy(net(strong(some)), guess, reduction="none") * counts).mean()
        optimizer.zero_grad()
        (labelled + unlabelled).backward()
        optimizer.step()
        with torch.no_grad():
            for a, b in zip(mean.parameters(), net.parameters()):
                a.lerp_(b, 0.05)
        if step % 25 == 0:
            print(f"{step:4d}  {labelled.item():.4f} + {unlabelled.item():.4f}, sure of {counts.mean().item():.2f}")
    print(f"final loss {held():.4f}")


if __name__ == "__main__":
    main()
