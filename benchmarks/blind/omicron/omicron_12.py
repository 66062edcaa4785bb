"""A GAN for points on eight Gaussians; both players have linears in FP8."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

import ottava

MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]

torch.manual_seed(13)
angles = torch.arange(8) * 6.2832 / 8
centres = 2 * torch.stack([angles.cos(), angles.sin()], 1)
generator = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))
critic = nn.Sequential(nn.Linear(2, 128), nn.LeakyReLU(0.2), nn.Linear(128, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1))
if not PLAIN:
    ottava.convert(generator, "tensorwise")
    ottava.convert(critic, "tensorwise")
optimizer_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.99))
optimizer_d = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.99))
losses = []
for _ in range(180):
    real = centres[torch.randint(8, (96,))] + 0.05 * torch.randn(96, 2)
    fake = generator(torch.randn(96, 32)).float()
    loss_d = F.softplus(-critic(real).float()).mean() + F.softplus(critic(fake.detach()).float()).mean()
    optimizer_d.zero_grad()
    loss_d.backward()
    optimizer_d.step()
    loss_g = F.softplus(-critic(fake).float()).mean()
    optimizer_g.zero_grad()
    loss_g.backward()
    optimizer_g.step()
    losses.append(loss_g.item())
print(f"loss {sum(losses[-10:]) / 10:.4f}")
