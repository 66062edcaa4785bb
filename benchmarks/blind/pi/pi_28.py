"""A small GAN on a ring of Gaussians: python pi_28.py good|bad [plain]."""

import math
import sys

import torch
from torch import nn

import ottava

MODE = sys.argv[1]
PLAIN = "plain" in sys.argv[2:]
STEPS = 180

torch.manual_seed(28)
generator = nn.Sequential(nn.Linear(32, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 2))
critic = nn.Sequential(nn.Linear(2, 96), nn.LeakyReLU(0.2), nn.Linear(96, 96), nn.LeakyReLU(0.2), nn.Linear(96, 1))
if not PLAIN:
    for net in (generator, critic):
        ottava.convert(net, "rowwise")
one = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
two = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))
bce = nn.functional.binary_cross_entropy_with_logits
losses, critics = [], []
for _ in range(STEPS):
    angle = torch.randint(8, (256,)) * (math.pi / 4)
    real = torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(256, 2)
    fake = generator(torch.randn(256, 32))
    loss = bce(critic(real), torch.full((256, 1), 0.9)) + bce(critic(fake.detach()), torch.zeros(256, 1))
    two.zero_grad()
    loss.backward()
    two.step()
    critics.append(loss.item())
    loss = bce(critic(fake), torch.ones(256, 1))
    one.zero_grad()
    loss.backward()
    one.step()
    losses.append(loss.item())
radius = fake.detach().norm(dim=1).mean().item()
print(f"loss {sum(losses[-10:]) / 10:.4f} critic {sum(critics[-10:]) / 10:.4f} radius {radius:.2f}")
