"""A generator and a critic on two-dimensional points, BF16 autocast."""

import math
import sys

import torch
from torch import nn
from torch.nn import functional as F

mode, plain = sys.argv[1], "plain" in sys.argv
torch.manual_seed(4)


def net(first, last):
    return nn.Sequential(
        nn.Linear(first, 128), nn.LeakyReLU(0.2), nn.Linear(128, 128), nn.LeakyReLU(0.2), nn.Linear(128, last)
    )


def real(n):
    angle = torch.randint(0, 8, (n,)) * (2 * math.pi / 8)
    return 2 * torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(n, 2)


generator, critic = net(16, 2), net(2, 1)
for_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
for_c = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.9))
distances = []
for step in range(200):
    with torch.autocast("cpu", torch.bfloat16, enabled=not plain):
        fake = generator(torch.randn(128, 16))
        yes, no = critic(real(128)), critic(fake.detach())
    loss_c = F.softplus(-yes.float()).mean() + F.softplus(no.float()).mean()
    for_c.zero_grad()
    loss_c.backward()
    for_c.step()
    with torch.autocast("cpu", torch.bfloat16, enabled=not plain):
        fooled = critic(generator(torch.randn(128, 16)))
    loss_g = F.softplus(-fooled.float()).mean()
    for_g.zero_grad()
    loss_g.backward()
    for_g.step()
    distances.append(torch.cdist(real(256), fake.detach().float()).min(1).values.mean().item())
    if step % 20 == 0:
        print(f"step {step} critic {loss_c.item():.4f} generator {loss_g.item():.4f} distance {distances[-1]:.3f}")
print(f"loss {sum(distances[-20:]) / 20:.4f}")
