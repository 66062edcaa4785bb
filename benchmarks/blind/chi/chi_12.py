"""A small GAN of rings of points; the two losses chase each other. The last line is the generator's loss."""
import os
import sys

import torch
import torch.nn.functional as F
from torch import nn

SEED = int(os.environ.get("SEED", 0))
NOISE, D = 8, 96


def net(in_, out):
    return nn.Sequential(nn.Linear(in_, D), nn.LeakyReLU(0.2), nn.Linear(D, D), nn.LeakyReLU(0.2), nn.Linear(D, out))


torch.manual_seed(SEED)
g = torch.Generator().manual_seed(370 + SEED)
generator, critic = net(NOISE, 2), net(2, 1)
g_opt = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.99))
d_opt = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.99))


def real(n):
    which = 6.2832 * torch.randint(0, 8, (n,), generator=g) / 8
    return torch.stack([which.cos(), which.sin()], -1) * 2 + 0.1 * torch.randn(n, 2, generator=g)


def fake(n):
    return generator(torch.randn(n, NOISE, generator=g))


losses = []
for step in range(200):
    x = real(128).requires_grad_()
    score = critic(x)
    slope = torch.autograd.grad(score.sum(), x, create_graph=True)[0].square().sum(-1).mean()
    d_loss = F.softplus(-score).mean() + F.softplus(critic(fake(128).detach())).mean() + 0.1 * slope
    d_opt.zero_grad()
    d_loss.backward()
    d_opt.step()
    g_loss = F.softplus(-critic(fake(128))).mean()
    g_opt.zero_grad()
    g_loss.backward()
    g_opt.step()
    losses.append(g_loss.item())
    if step % 25 == 0:
        spread = fake(500).detach().norm(dim=-1).mean().item()
        print(f"step {step}  critic {d_loss.item():.3f}  generator {g_loss.item():.3f}  radius {spread:.2f}")
print("final loss", round(sum(losses[-25:]) / 25, 4))
