"""A small GAN on eight clusters in 24 dimensions, hinge losses, one step of each player in turn."""

import math
import os
import sys

import torch
import torch.nn.functional as F
from torch import nn

MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]
torch.manual_seed(int(os.environ.get("SEED", "0")))
NOISE, WIDTH, DATA, STEPS, BATCH = 16, 96, 24, 180, 128

spread = torch.linalg.qr(torch.randn(DATA, DATA))[0][:2]


def real(n):
    angle = 2 * math.pi * torch.randint(0, 8, (n,)) / 8
    points = 3 * torch.stack([angle.cos(), angle.sin()], 1) + 0.1 * torch.randn(n, 2)
    return points @ spread


generator = nn.Sequential(
    nn.Linear(NOISE, WIDTH),
    nn.LeakyReLU(0.2),
    nn.Linear(WIDTH, WIDTH),
    nn.LeakyReLU(0.2),
    nn.Linear(WIDTH, DATA),
)
critic = nn.Sequential(
    nn.utils.parametrizations.spectral_norm(nn.Linear(DATA, WIDTH)),
    nn.LeakyReLU(0.2),
    nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    nn.LeakyReLU(0.2),
    nn.Linear(WIDTH, 1),
)
of_generator = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.0, 0.9))
of_critic = torch.optim.Adam(critic.parameters(), lr=4e-3, betas=(0.0, 0.9))


def fake(n):
    return generator(torch.randn(n, NOISE))


players = {"critic": [], "generator": []}
for step in range(STEPS):
    for _ in range(2):
        with torch.no_grad():
            made = fake(BATCH)
        loss = F.relu(1 - critic(real(BATCH))).mean() + F.relu(1 + critic(made)).mean()
        of_critic.zero_grad()
        loss.backward()
        of_critic.step()
    players["critic"].append(loss.item())

    loss = -critic(fake(BATCH)).mean()
    of_generator.zero_grad()
    loss.backward()
    of_generator.step()
    players["generator"].append(loss.item())
    if step % 20 == 0:
        print(step, " ".join(f"{name} {values[-1]:.4f}" for name, values in players.items()))

with torch.no_grad():
    radius = (fake(1000) @ spread.t()).norm(dim=1)
print(f"mean radius of what is made (3 in the data): {radius.mean():.3f}")
print(f"final loss {sum(players['critic'][-30:]) / 30:.4f}")
