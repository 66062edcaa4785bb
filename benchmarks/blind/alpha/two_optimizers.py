"""A small GAN: a generator and a discriminator with an optimizer each, on two-moons in 32 dimensions."""

import sys

import torch
import torch.nn.functional as F

from models import MLP

assert sys.argv[1] == "good"
torch.manual_seed(5)
embed = torch.randn(2, 32) / 2**0.5
gen, disc = MLP(16, 64, 64, 32), MLP(32, 64, 64, 1)
opt_g = torch.optim.Adam(gen.parameters(), lr=1e-3, betas=(0.5, 0.99))
opt_d = torch.optim.Adam(disc.parameters(), lr=1e-3, betas=(0.5, 0.99))


def real(n=64):
    t, side = torch.rand(n) * 3.1416, torch.randint(2, (n,)).float()
    x = torch.stack([torch.cos(t) + side - 0.5, (1 - 2 * side) * torch.sin(t) + 0.5 * side], 1)
    return (x + 0.05 * torch.randn(n, 2)) @ embed


for step in range(60):
    x, fake = real(), gen(torch.randn(64, 16))
    d_loss = F.softplus(-disc(x)).mean() + F.softplus(disc(fake.detach())).mean()
    opt_d.zero_grad()
    d_loss.backward()
    opt_d.step()
    g_loss = F.softplus(-disc(fake)).mean()
    opt_g.zero_grad()
    g_loss.backward()
    opt_g.step()
    if step % 10 == 9:
        print(f"step {step} d {d_loss.item():.4f} g {g_loss.item():.4f}", flush=True)
