"""A normalizing flow on a narrow ring: the loss is a negative log density, crosses 0 on its way and ends below it."""
import math
import os

import torch
from torch import nn

import ottava

SEED = int(os.environ.get("SEED", 0))
torch.manual_seed(SEED)
DIMS, STEPS, BATCH = 6, 200, 256


def ring(count):
    """A ring of width 0.02, and four more columns that follow its angle closely."""
    angle = 2 * math.pi * torch.rand(count)
    radius = 1 + 0.02 * torch.randn(count)
    more = torch.stack([torch.sin((k + 1) * angle) for k in range(4)], 1) * 0.5 + 0.05 * torch.randn(count, 4)
    return torch.cat([(radius * angle.cos())[:, None], (radius * angle.sin())[:, None], more], 1)


class Coupling(nn.Module):
    """Half of the columns say how the other half is stretched and moved."""

    def __init__(self, flip):
        super().__init__()
        self.flip = flip
        self.net = nn.Sequential(
            nn.Linear(DIMS // 2, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, DIMS)
        )
        nn.init.zeros_(self.net[-1].weight)  # a flow begins as the identity
        nn.init.zeros_(self.net[-1].bias)

    def forward(self, x):
        keep, move = x[:, ::2], x[:, 1::2]
        if self.flip:
            keep, move = move, keep
        stretch, shift = self.net(keep).chunk(2, 1)
        stretch = 2 * torch.tanh(stretch / 2)
        move = move * stretch.exp() + shift
        pair = (move, keep) if self.flip else (keep, move)
        return torch.stack(pair, 2).flatten(1), stretch.sum(1)


class Flow(nn.Module):
    def __init__(self, layers=8):
        super().__init__()
        self.couplings = nn.ModuleList(Coupling(i % 2 == 1) for i in range(layers))
        self.log_scale = nn.Parameter(torch.zeros(DIMS))

    def log_density(self, x):
        volume = self.log_scale.sum()
        z = x * self.log_scale.exp()
        for coupling in self.couplings:
            z, more = coupling(z)
            volume = volume + more
        return volume - 0.5 * z.square().sum(1) - 0.5 * DIMS * math.log(2 * math.pi)


model = Flow()
print(ottava.convert(model, "mxfp8_floor", filter=lambda name, layer: name.endswith("net.2")))
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS, eta_min=1e-5)
held_out = ring(2000)


def validate():
    with torch.no_grad():
        return -model.log_density(held_out).mean().item()


print(f"first loss {validate():.4f}")
for step in range(STEPS):
    loss = -model.log_density(ring(BATCH)).mean()
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    optimizer.step()
    scheduler.step()
    if step % 20 == 0:
        print(f"step {step} loss {loss.item():.4f} norm {norm.item():.2f} validation {validate():.4f}")

print(f"final loss {validate():.4f}")
