"""A GAN with hinge loss on a ring of Gaussians; both players under ottava."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

import ottava

PLAIN = "plain" in sys.argv[2:]
torch.manual_seed(32)


def real(n=128):
    angle = torch.randint(0, 8, (n,)) * torch.pi / 4
    return torch.stack([angle.cos(), angle.sin()], 1) * 2 + 0.1 * torch.randn(n, 2)


maker = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))
critic = nn.Sequential(nn.Linear(2, 128), nn.LeakyReLU(0.2), nn.Linear(128, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1))
if not PLAIN:
    ottava.convert(maker, "tensorwise")
    ottava.convert(critic, "tensorwise")
opt_maker = torch.optim.Adam(maker.parameters(), lr=1e-3, betas=(0.5, 0.99))
opt_critic = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.99))
losses = []
for step in range(150):
    fake = maker(torch.randn(128, 32))
    loss = F.relu(1 - critic(real())).mean() + F.relu(1 + critic(fake.detach())).mean()
    opt_critic.zero_grad()
    loss.backward()
    opt_critic.step()
    other = -critic(fake).mean()
    opt_maker.zero_grad()
    other.backward()
    opt_maker.step()
    losses.append(loss.item())
    if step % 10 == 0:
        print(step, f"critic {loss.item():.4f}", f"maker {other.item():.4f}")
print(f"loss {sum(losses[-10:]) / 10:.4f}")
