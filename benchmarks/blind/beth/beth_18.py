"""Sharpness-aware minimization: two forwards and two backwards a step, the first of which moves the weights uphill.

A fifth of the training labels is wrong, so the training loss must stay high. Blocks are computed again for backward.
"""

import os

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ottava

SEED = int(os.environ.get("SEED", "0"))
PATCHES, INPUT, WIDTH, CLASSES, STEPS, RHO = 16, 32, 64, 8, 120, 0.1


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.across = nn.Sequential(nn.Linear(PATCHES, 32), nn.GELU(), nn.Linear(32, PATCHES))
        self.within = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x):
        x = x + self.across(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.within(self.norm2(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(INPUT, WIDTH)
        self.blocks = nn.ModuleList(Mixer() for _ in range(2))
        self.norm, self.leave = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.leave(self.norm(x.mean(1)))


def pictures(count: int, parts: torch.Tensor, wrong: float, g: torch.Generator):
    """Patches are noise, but for three that show the class."""
    y = torch.randint(0, CLASSES, (count,), generator=g)
    x = torch.randn(count, PATCHES, INPUT, generator=g)
    for _ in range(3):
        x[torch.arange(count), torch.randint(0, PATCHES, (count,), generator=g)] += parts[y]
    flip = torch.rand(count, generator=g) < wrong
    return x, torch.where(flip, torch.randint(0, CLASSES, (count,), generator=g), y)


def climb(parameters: list[nn.Parameter]) -> list[torch.Tensor]:
    """To the worst point near by."""
    norm = torch.stack([p.grad.norm() for p in parameters]).norm()
    moves = [p.grad * (RHO / (norm + 1e-12)) for p in parameters]
    with torch.no_grad():
        for p, move in zip(parameters, moves):
            p.add_(move)
    return moves


def main() -> None:
    torch.manual_seed(SEED)
    g = torch.Generator().manual_seed(SEED)
    parts = 1.5 * torch.randn(CLASSES, INPUT, generator=g)
    x, y = pictures(1500, parts, 0.2, g)
    held_x, held_y = pictures(400, parts, 0.0, g)
    net = Net()
    print(ottava.convert(net, "rowwise_with_gw_hp"))
    parameters = list(net.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS, eta_min=1e-5)

    print(f"first loss {F.cross_entropy(net(held_x), held_y).item():.4f}")
    for step in range(STEPS):
        at = torch.randint(0, len(x), (48,), generator=g)
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(net(x[at]), y[at])
        loss.backward()
        moves = climb(parameters)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            above = F.cross_entropy(net(x[at]), y[at])
        above.backward()
        with torch.no_grad():
            for p, move in zip(parameters, moves):
                p.sub_(move)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 20 == 0:
            print(f"{step:4d}  {loss.item():.4f}  {above.item():.4f}")
    with torch.no_grad():
        print(f"final loss {F.cross_entropy(net(held_x), held_y).item():.4f}")


if __name__ == "__main__":
    main()
