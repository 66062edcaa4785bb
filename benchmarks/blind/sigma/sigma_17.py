"""A small GAN on a ring of points; the generator's loss swings. torchao's tensorwise casts (emulated)."""
import os
import sys

import torch
from torch import nn
from torch.nn import functional as F
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

SEED = int(os.environ.get("SEED", "0"))
PLAIN = "plain" in sys.argv[2:]


class Gan(nn.Module):
    def __init__(self):
        super().__init__()
        self.g = nn.Sequential(nn.Linear(16, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 2))
        self.d = nn.Sequential(nn.Linear(2, 96), nn.LeakyReLU(0.2), nn.Linear(96, 96), nn.LeakyReLU(0.2), nn.Linear(96, 1))


torch.manual_seed(SEED)
gan = Gan()
if not PLAIN:
    convert_to_float8_training(
        gan, config=Float8LinearConfig(emulate=True),
        module_filter_fn=lambda m, name: isinstance(m, nn.Linear) and m.in_features >= 16 and m.out_features >= 16,
    )
opt_g = torch.optim.Adam(gan.g.parameters(), lr=1e-3, betas=(0.5, 0.99))
opt_d = torch.optim.Adam(gan.d.parameters(), lr=1e-3, betas=(0.5, 0.99))
tail = []
for step in range(90):
    angle = torch.rand(96, 1) * 6.2832
    real = torch.cat([angle.cos(), angle.sin()], 1) * 2 + 0.1 * torch.randn(96, 2)
    fake = gan.g(torch.randn(96, 16))
    loss_d = F.softplus(-gan.d(real)).mean() + F.softplus(gan.d(fake.detach())).mean()
    opt_d.zero_grad()
    loss_d.backward()
    opt_d.step()
    loss_g = F.softplus(-gan.d(fake)).mean()
    opt_g.zero_grad()
    loss_g.backward()
    opt_g.step()
    tail.append(loss_g.item())
    if step % 10 == 0:
        print(step, round(loss_d.item(), 4), round(loss_g.item(), 4))
print(f"final loss {sum(tail[-10:]) / 10:.4f}")
