"""Two networks against each other: a generator of spirals and its critic. Neither loss goes to zero."""
import sys

import torch
from torch import nn
from torch.nn import functional as F

import ottava

PLAIN = "plain" in sys.argv
torch.manual_seed(105)
maker = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
critic = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
if not PLAIN:
    ottava.convert(maker, "tensorwise")
    ottava.convert(critic, "tensorwise")
g_step = torch.optim.Adam(maker.parameters(), lr=1e-3, betas=(0.5, 0.99))
d_step = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.99))
d_losses, g_losses = [], []
for step in range(250):
    t = torch.rand(128) * 9
    real = torch.stack([t * t.cos(), t * t.sin()], 1) / 6 + 0.05 * torch.randn(128, 2)
    fake = maker(torch.randn(128, 32))
    d_loss = F.softplus(-critic(real)).mean() + F.softplus(critic(fake.detach())).mean()
    d_step.zero_grad()
    d_loss.backward()
    d_step.step()
    g_loss = F.softplus(-critic(fake)).mean()
    g_step.zero_grad()
    g_loss.backward()
    g_step.step()
    d_losses.append(d_loss.item())
    g_losses.append(g_loss.item())
with torch.no_grad():
    made = maker(torch.randn(512, 32))
print(f"made radius {made.norm(dim=1).mean():.3f}, real 0.75, critic {sum(d_losses[-20:]) / 20:.4f}")
print(f"loss {sum(g_losses[-20:]) / 20:.4f}")
