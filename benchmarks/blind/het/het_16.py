"""A GAN for a ring of Gaussians: two losses that never settle, and a distance of samples at the end."""
import os
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

mode = sys.argv[1]
plain = "plain" in sys.argv[2:]
seed = int(os.environ.get("SEED", 0))
torch.manual_seed(seed)

STEPS, BATCH, NOISE = 200, 256, 16
centers = torch.stack([torch.tensor([2.0, 0.0]) @ torch.tensor([[c, s], [-s, c]]) for c, s in
                       [(torch.cos(a), torch.sin(a)) for a in torch.arange(8) * torch.pi / 4]])


def real(n):
    return centers[torch.randint(0, 8, (n,))] + 0.15 * torch.randn(n, 2)


def net(n_in, n_out):
    return nn.Sequential(
        nn.Linear(n_in, 128), nn.LeakyReLU(0.2), nn.Linear(128, 128), nn.LeakyReLU(0.2), nn.Linear(128, n_out)
    )


generator, critic = net(NOISE, 2), net(2, 1)
if not plain:
    config = Float8LinearConfig(emulate=True)
    for part in (generator, critic):
        convert_to_float8_training(
            part, config=config, module_filter_fn=lambda m, name: min(m.in_features, m.out_features) >= 16
        )
opt_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
opt_d = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.9))


def distance(a, b):
    return 2 * torch.cdist(a, b).mean() - torch.cdist(a, a).mean() - torch.cdist(b, b).mean()


for step in range(STEPS):
    fake = generator(torch.randn(BATCH, NOISE))
    loss_d = F.softplus(-critic(real(BATCH))).mean() + F.softplus(critic(fake.detach())).mean()
    opt_d.zero_grad()
    loss_d.backward()
    opt_d.step()
    loss_g = F.softplus(-critic(generator(torch.randn(BATCH, NOISE)))).mean()
    opt_g.zero_grad()
    loss_g.backward()
    opt_g.step()
    if step % 20 == 0:
        print(f"step {step} critic {loss_d.item():.3f} generator {loss_g.item():.3f}")
with torch.no_grad():
    gap = distance(generator(torch.randn(1000, NOISE)), real(1000)).item()
print(f"final loss {gap:.4f}")
