"""A small GAN: neither loss falls for long, and neither should."""

import os
import sys

import torch
from torch import nn

MODE = sys.argv[1]
torch.manual_seed(int(os.environ.get("SEED", "0")))


def real(count):
    angle = torch.randint(6, (count,)) * (torch.pi / 3)
    return torch.stack([angle.cos(), angle.sin()], 1) + 0.08 * torch.randn(count, 2)


def main():
    generator = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    critic = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
    of_generator = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.99))
    of_critic = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.99))
    for step in range(100):
        truth, fake = real(128), generator(torch.randn(128, 8))
        critic_loss = nn.functional.softplus(-critic(truth)).mean() + nn.functional.softplus(critic(fake.detach())).mean()
        of_critic.zero_grad()
        critic_loss.backward()
        of_critic.step()
        generator_loss = nn.functional.softplus(-critic(fake)).mean()
        of_generator.zero_grad()
        generator_loss.backward()
        of_generator.step()
        if step % 10 == 0:
            print(f"step {step} critic {critic_loss.item():.4f} generator {generator_loss.item():.4f}")
    with torch.no_grad():
        radius = generator(torch.randn(1024, 8)).norm(dim=1)
    print(f"final loss {(radius - 1).abs().mean().item():.4f}")


main()
