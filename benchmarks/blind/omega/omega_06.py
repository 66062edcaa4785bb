"""A small generative adversarial network on rings of points."""

import os

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(int(os.environ.get("SEED", 0)))
torch.set_num_threads(1)

STEPS, BATCH, NOISE, WIDTH = 200, 128, 8, 96


def ring(n):
    at = 2 * torch.pi * torch.randint(0, 8, (n,)) / 8
    return torch.stack([at.cos(), at.sin()], -1) * 1.5 + 0.1 * torch.randn(n, 2)


def network(inp, out):
    return nn.Sequential(
        nn.Linear(inp, WIDTH), nn.LeakyReLU(0.2), nn.Linear(WIDTH, WIDTH), nn.LeakyReLU(0.2), nn.Linear(WIDTH, out)
    )


maker, critic = network(NOISE, 2), network(2, 1)
make_step = torch.optim.Adam(maker.parameters(), lr=2e-3, betas=(0.5, 0.99))
judge_step = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.99))
losses = []
for step in range(STEPS):
    for _ in range(2):
        real, fake = ring(BATCH).requires_grad_(True), maker(torch.randn(BATCH, NOISE)).detach()
        score = critic(real)
        slope = torch.autograd.grad(score.sum(), real, create_graph=True)[0]
        judged = F.softplus(-score).mean() + F.softplus(critic(fake)).mean() + 0.1 * slope.square().sum(-1).mean()
        judge_step.zero_grad()
        judged.backward()
        judge_step.step()
    made = F.softplus(-critic(maker(torch.randn(BATCH, NOISE)))).mean()
    make_step.zero_grad()
    made.backward()
    make_step.step()
    losses.append(made.item())
    if step % 10 == 0:
        print(f"step {step} loss of the maker {made.item():.4f} of the critic {judged.item():.4f}")

with torch.no_grad():
    points = maker(torch.randn(2000, NOISE))
print(f"mean radius {points.norm(dim=-1).mean():.3f}, spread {points.std(0).mean():.3f}")
print(f"final loss {sum(losses[-20:]) / 20:.4f}")
