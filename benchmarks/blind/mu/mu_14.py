"""A GAN on a ring of eight Gaussians, its layers in torchao's float8."""

import sys

import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

PLAIN = "plain" in sys.argv


def network(inputs, outputs):
    return nn.Sequential(
        nn.Linear(inputs, 96), nn.LeakyReLU(0.2), nn.Linear(96, 96), nn.LeakyReLU(0.2), nn.Linear(96, outputs)
    )


def real(count):
    angle = torch.randint(0, 8, (count,)) * (torch.pi / 4)
    return torch.stack([angle.cos(), angle.sin()], 1) * 2 + torch.randn(count, 2) * 0.1


torch.manual_seed(9)
generator, critic = network(16, 2), network(2, 1)
if not PLAIN:
    for net in (generator, critic):
        convert_to_float8_training(
            net, config=Float8LinearConfig(emulate=True), module_filter_fn=lambda layer, name: name == "2"
        )
g_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.99))
c_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.99))
bce = nn.functional.binary_cross_entropy_with_logits
losses = []
for step in range(150):
    fake = generator(torch.randn(128, 16))
    truth, lie = critic(real(128)), critic(fake.detach())
    c_loss = bce(truth, torch.ones_like(truth)) + bce(lie, torch.zeros_like(lie))
    c_optimizer.zero_grad()
    c_loss.backward()
    c_optimizer.step()
    verdict = critic(fake)
    g_loss = bce(verdict, torch.ones_like(verdict))
    g_optimizer.zero_grad()
    g_loss.backward()
    g_optimizer.step()
    losses.append(g_loss.item())
    if step % 20 == 0:
        print(step, "critic", round(c_loss.item(), 4), "generator", round(g_loss.item(), 4))
print(f"loss {sum(losses[-10:]) / 10:.4f}")
