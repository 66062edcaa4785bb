"""Diffusion of points on two moons: the loss of a random time is noisy (32 points a batch), so what counts is a validation loss of averaged weights."""
import copy
import math
import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ottava

SEED = int(os.environ.get("SEED", 0))
torch.manual_seed(SEED)
STEPS, TIMES = 300, 100


def moons(count):
    angle = torch.rand(count) * math.pi
    upper = torch.rand(count) < 0.5
    x = torch.where(upper, angle.cos(), 1 - angle.cos())
    y = torch.where(upper, angle.sin(), 0.5 - angle.sin())
    return (torch.stack([x, y], 1) - torch.tensor([0.5, 0.25])) * 1.5 + 0.03 * torch.randn(count, 2)


class Denoiser(nn.Module):
    def __init__(self, width=128):
        super().__init__()
        self.enter = nn.Linear(2 + 32, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))
            for _ in range(2)
        )
        for block in self.blocks:  # every block begins as the identity
            nn.init.zeros_(block[3].weight)
            nn.init.zeros_(block[3].bias)
        self.leave = nn.Linear(width, 2)

    def forward(self, x, t):
        rates = torch.exp(-math.log(1000) * torch.arange(16) / 16)
        angle = t[:, None] * rates
        h = self.enter(torch.cat([x, angle.sin(), angle.cos()], 1))
        for block in self.blocks:
            h = h + block(h)
        return self.leave(h)


beta = torch.linspace(1e-3, 0.08, TIMES)
kept = torch.cumprod(1 - beta, 0)


def loss_of(model, x, t, noise):
    level = kept[t][:, None]
    noisy = level.sqrt() * x + (1 - level).sqrt() * noise
    return (model(noisy, t.float()) - noise).square().mean()


model = Denoiser()
ottava.convert(model, "guarded", filter=lambda name, layer: "blocks" in name)
average = copy.deepcopy(model).requires_grad_(False).eval()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
loader = DataLoader(TensorDataset(moons(32 * 300)), batch_size=32, shuffle=True, drop_last=True)
held_out = moons(1024)
held_times, held_noise = torch.randint(0, TIMES, (1024,)), torch.randn(1024, 2)


def validate():
    with torch.no_grad():
        return loss_of(average, held_out, held_times, held_noise).item()


print(f"first loss {validate():.4f}")
step = 0
while step < STEPS:
    for (x,) in loader:
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1, (step + 1) / 20)
        t = torch.randint(0, TIMES, (len(x),))
        loss = loss_of(model, x, t, torch.randn_like(x))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        decay = min(0.99, (1 + step) / (10 + step))
        with torch.no_grad():
            for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast, 1 - decay)
        if step % 20 == 0:
            print(f"step {step} loss {loss.item():.4f} validation {validate():.4f}")
        step += 1
        if step == STEPS:
            break

print(f"final loss {validate():.4f}")
