"""A GAN with a lazy R1 penalty: each 16th step of the critic has a penalty of 16 times its weight and the others none."""
import copy
import math
import os

import torch
import torch.nn.functional as F
from torch import nn

SEED = int(os.environ.get("SEED", "0"))
torch.manual_seed(SEED)
NOISE, STEPS, BATCH, LAZY, GAMMA = 8, 300, 128, 16, 0.2


def real(count):
    """Six points on a circle."""
    angle = torch.randint(6, (count,)) * math.pi / 3
    return torch.stack([angle.cos(), angle.sin()], 1) * 1.5 + 0.1 * torch.randn(count, 2)


def net(inputs, outputs):
    return nn.Sequential(
        nn.Linear(inputs, 96), nn.LeakyReLU(0.2), nn.Linear(96, 96), nn.LeakyReLU(0.2), nn.Linear(96, outputs)
    )


generator, critic = net(NOISE, 2), net(2, 1)
average = copy.deepcopy(generator).requires_grad_(False)
generator_optimizer = torch.optim.Adam(generator.parameters(), 1e-3, betas=(0.0, 0.99))
ratio = LAZY / (LAZY + 1)  # as StyleGAN2 corrects rate and betas for the lazy steps
critic_optimizer = torch.optim.Adam(critic.parameters(), 2e-3 * ratio, betas=(0.0, 0.99**ratio))


@torch.no_grad()
def distance():
    """Sliced Wasserstein distance between the averaged generator and the data."""
    with torch.random.fork_rng():
        torch.manual_seed(99)
        one, two = average(torch.randn(2000, NOISE)), real(2000)
        ways = F.normalize(torch.randn(2, 64), dim=0)
    return ((one @ ways).sort(0).values - (two @ ways).sort(0).values).abs().mean().item()


print("first loss %.4f" % distance())
for step in range(STEPS):
    data, fake = real(BATCH), generator(torch.randn(BATCH, NOISE)).detach()
    loss = F.softplus(critic(fake)).mean() + F.softplus(-critic(data)).mean()
    critic_optimizer.zero_grad()
    loss.backward()
    critic_optimizer.step()

    if step % LAZY == 0:
        data = real(BATCH).requires_grad_()
        (slope,) = torch.autograd.grad(critic(data).sum(), data, create_graph=True)
        penalty = GAMMA / 2 * slope.square().sum(1).mean() * LAZY
        critic_optimizer.zero_grad()
        penalty.backward()
        critic_optimizer.step()

    loss = F.softplus(-critic(generator(torch.randn(BATCH, NOISE)))).mean()
    generator_optimizer.zero_grad()
    loss.backward()
    generator_optimizer.step()
    with torch.no_grad():
        for old, new in zip(average.parameters(), generator.parameters()):
            old.lerp_(new, 0.03)
    if step % 50 == 0:
        print(f"step {step}: generator {loss.item():.3f}, distance {distance():.4f}")
print("final loss %.4f" % distance())
