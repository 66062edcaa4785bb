"""A GAN on a ring of Gaussians: two optimizers, alternating steps."""
import os
import sys

import torch
import torch.nn.functional as F
from torch import nn

PLAIN, SEED = "plain" in sys.argv, int(os.environ.get("SEED", 0))
torch.manual_seed(SEED)


class Gan(nn.Module):
    def __init__(self):
        super().__init__()
        self.g = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
        self.d = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))


model = Gan()
opt_g = torch.optim.Adam(model.g.parameters(), lr=2e-3, betas=(0.5, 0.9))
opt_d = torch.optim.Adam(model.d.parameters(), lr=2e-3, betas=(0.5, 0.9))
losses = []
for step in range(100):
    angle = torch.randint(8, (128,)) * torch.pi / 4
    real = torch.stack([angle.cos(), angle.sin()], 1) * 2 + 0.05 * torch.randn(128, 2)
    fake = model.g(torch.randn(128, 8))
    loss_d = F.softplus(-model.d(real)).mean() + F.softplus(model.d(fake.detach())).mean()
    opt_d.zero_grad()
    loss_d.backward()
    opt_d.step()
    loss_g = F.softplus(-model.d(fake)).mean()
    opt_g.zero_grad()
    loss_g.backward()
    opt_g.step()
    losses.append(loss_g.item())
    if step % 10 == 0:
        print(f"step {step} d {loss_d.item():.4f} g {loss_g.item():.4f}")
print(f"final loss {sum(losses[-10:]) / 10:.4f}")
