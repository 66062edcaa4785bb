"""An energy-based model of points in a plane: Langevin dynamics with a buffer of old samples gives the negatives.

What is minimized is a difference of two energies, which lies around 0 all the time; what counts is where the
samples lie.

python zayin_22.py good|bad
"""

import os

import torch
from torch import nn

import ottava

SEED = int(os.environ.get("SEED", 0))
torch.manual_seed(SEED)
BATCH = 128


def data(count):
    """Four lumps on a ring."""
    angle = torch.randint(0, 4, (count,)) * (torch.pi / 2) + 0.25 * torch.randn(count)
    radius = 1.5 + 0.08 * torch.randn(count)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)


energy = nn.Sequential(nn.Linear(2, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1))
ottava.convert(energy, "mxfp8")
optimizer = torch.optim.Adam(energy.parameters(), lr=2e-3, betas=(0.0, 0.99))
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 240, eta_min=2e-4)
buffer = 4 * torch.rand(2048, 2) - 2


def langevin(x, steps, size=0.1, noise=0.03):
    energy.requires_grad_(False)
    for _ in range(steps):
        x = x.detach().requires_grad_()
        slope = torch.autograd.grad(energy(x).sum(), x)[0].clamp(-1, 1)
        x = x - size * slope + noise * torch.randn_like(x)
    energy.requires_grad_(True)
    return x.detach().clamp(-3, 3)


def distance(a, b, count=64):
    generator = torch.Generator().manual_seed(5)
    directions = nn.functional.normalize(torch.randn(2, count, generator=generator), dim=0)
    return ((a @ directions).sort(0)[0] - (b @ directions).sort(0)[0]).abs().mean().item()


def held_out():
    return distance(langevin(4 * torch.rand(1000, 2) - 2, 150), data(1000))


print(f"first loss {held_out():.4f}")
for step in range(240):
    real = data(BATCH) + 0.03 * torch.randn(BATCH, 2)
    chosen = torch.randint(0, len(buffer), (BATCH,))
    start = buffer[chosen]
    fresh = torch.rand(BATCH) < 0.05
    start[fresh] = 4 * torch.rand(int(fresh.sum()), 2) - 2
    fake = langevin(start, 10)
    buffer[chosen] = fake
    e_real, e_fake = energy(torch.cat([real, fake])).squeeze(1).split(BATCH)
    loss = e_real.mean() - e_fake.mean() + 0.05 * (e_real.square() + e_fake.square()).mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(energy.parameters(), 0.5)
    optimizer.step()
    schedule.step()
    if step % 30 == 0:
        print(f"step {step} loss {loss.item():+.4f} real {e_real.mean().item():+.3f} fake {e_fake.mean().item():+.3f}")
print(f"final loss {held_out():.4f}")
