"""A GAN on a ring of eight blobs; the linears of both networks run in FP8."""
import os
import sys

import torch
import torch.nn as nn
import torch.nn.functional as F
import ottava

mode, plain = sys.argv[1], "plain" in sys.argv
torch.manual_seed(int(os.environ.get("SEED", 0)))
NOISE, HIDDEN, BATCH, STEPS = 32, 128, 128, 200


def mlp(a, b):
    return nn.Sequential(
        nn.Linear(a, HIDDEN), nn.LeakyReLU(0.2), nn.Linear(HIDDEN, HIDDEN), nn.LeakyReLU(0.2), nn.Linear(HIDDEN, b)
    )


def real(n):
    angle = torch.randint(0, 8, (n,)) * (2 * torch.pi / 8)
    return torch.stack([angle.cos(), angle.sin()], -1) * 2 + 0.1 * torch.randn(n, 2)


generator, critic = mlp(NOISE, 2), mlp(2, 1)
if not plain:
    ottava.convert(generator, "tensorwise")
    ottava.convert(critic, "tensorwise")
g_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
d_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))

losses = []
for step in range(STEPS):
    fake = generator(torch.randn(BATCH, NOISE))
    d_loss = F.softplus(critic(fake.detach())).mean() + F.softplus(-critic(real(BATCH))).mean()
    d_optimizer.zero_grad()
    d_loss.backward()
    d_optimizer.step()

    g_loss = F.softplus(-critic(generator(torch.randn(BATCH, NOISE)))).mean()
    g_optimizer.zero_grad()
    g_loss.backward()
    g_optimizer.step()
    losses.append(g_loss.item())
    if step % 40 == 0:
        print(f"step {step} generator {g_loss.item():.4f} critic {d_loss.item():.4f}")
print(f"final loss {sum(losses[-40:]) / 40:.4f}")
