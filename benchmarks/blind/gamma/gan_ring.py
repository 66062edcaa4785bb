"""A small GAN on a ring of points."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
maker = nn.Sequential(nn.Linear(8, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 2))
critic = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
opt_m = torch.optim.Adam(maker.parameters(), lr=1e-3, betas=(0.5, 0.9))
opt_c = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))
for step in range(250):
    angle = 6.2832 * torch.rand(256, 1)
    real = torch.cat([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(256, 2)
    fake = maker(torch.randn(256, 8))
    loss_c = (F.softplus(-critic(real)) + F.softplus(critic(fake.detach()))).mean()
    opt_c.zero_grad()
    loss_c.backward()
    opt_c.step()
    loss_m = F.softplus(-critic(fake)).mean()
    opt_m.zero_grad()
    loss_m.backward()
    opt_m.step()
    print(step, round(loss_c.item(), 4), round(loss_m.item(), 4))
