"""A picture as a sum of 2D Gaussians: those with a large gradient are split, faint ones are removed, and once all
opacities go back to a small value. Each such change makes a new optimizer.

python zayin_25.py good|bad
"""

import os

import torch
from torch import nn

SEED = int(os.environ.get("SEED", 0))
torch.manual_seed(SEED)
SIDE, STEPS = 40, 300
grid = torch.stack(torch.meshgrid(*[torch.linspace(0, 1, SIDE)] * 2, indexing="ij"), dim=-1).view(-1, 2)


def picture():
    image = torch.full((SIDE * SIDE, 3), 0.05)
    for _ in range(7):
        center, size, color = 0.15 + 0.7 * torch.rand(2), 0.06 + 0.16 * torch.rand(1), torch.rand(3)
        if torch.rand(()) < 0.5:
            inside = (grid - center).norm(dim=1) < size
        else:
            inside = ((grid - center).abs() < size).all(dim=1)
        image[inside] = color
    return image


image = picture()


def start(count):
    return {
        "center": torch.rand(count, 2),
        "log_size": torch.full((count, 2), -2.5) + 0.1 * torch.randn(count, 2),
        "angle": torch.zeros(count),
        "color": 0.1 * torch.randn(count, 3),
        "opacity": torch.zeros(count),
    }


def leaves(values):
    return {name: nn.Parameter(value.detach().clone()) for name, value in values.items()}


def new_optimizer(p):
    rates = {"center": 0.004, "log_size": 0.02, "angle": 0.03, "color": 0.03, "opacity": 0.05}
    return torch.optim.Adam([{"params": [p[name]], "lr": rate} for name, rate in rates.items()], eps=1e-15)


def render(p):
    offset = grid[None] - p["center"][:, None]
    c, s = p["angle"].cos()[:, None], p["angle"].sin()[:, None]
    turned = torch.stack([c * offset[..., 0] + s * offset[..., 1], c * offset[..., 1] - s * offset[..., 0]], dim=-1)
    weight = torch.exp(-0.5 * (turned / p["log_size"].exp()[:, None]).square().sum(dim=-1))
    weight = weight * p["opacity"].sigmoid()[:, None]
    return weight.T @ p["color"] + 0.05


p = leaves(start(30))
optimizer = new_optimizer(p)
pulls = torch.zeros(30)
print(f"first loss {(render(p) - image).square().mean().item():.5f}")
for step in range(1, STEPS + 1):
    loss = (render(p) - image).square().mean()
    optimizer.zero_grad()
    loss.backward()
    pulls += p["center"].grad.norm(dim=1)
    optimizer.step()
    if step in (50, 100, 150, 200):  # more where the picture pulls hardest
        values = {name: value.detach() for name, value in p.items()}
        keep = values["opacity"].sigmoid() > 0.02
        split = keep & (pulls >= pulls[keep].quantile(0.65))
        twins = {name: value[split].clone() for name, value in values.items()}
        sizes = twins["log_size"].exp()
        twins["center"] += sizes * torch.randn_like(sizes)
        twins["log_size"] -= 0.47
        values["log_size"] = values["log_size"] - 0.47 * split[:, None]
        p = leaves({name: torch.cat([values[name][keep], twins[name]]) for name in values})
        optimizer, pulls = new_optimizer(p), torch.zeros(len(p["opacity"]))
        print(f"step {step}: {len(pulls)} Gaussians, {int((~keep).sum())} removed, {int(split.sum())} split")
    if step == 125:  # what is not needed does not come back
        p["opacity"].data.clamp_(max=-2.2)
        optimizer = new_optimizer(p)
    if step % 25 == 0:
        print(f"step {step} loss {loss.item():.5f}")
print(f"final loss {(render(p) - image).square().mean().item():.5f}")
