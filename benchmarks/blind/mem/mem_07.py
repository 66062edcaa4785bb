"""Learns an embedding whose distances are those of a hidden map (metric learning)."""

import os
import sys

import torch
from torch import nn

SEED = int(os.environ.get("SEED", "0"))
bad = sys.argv[1] == "bad"
torch.manual_seed(SEED)

g = torch.Generator().manual_seed(8)
lift1, lift2 = torch.randn(3, 64, generator=g), torch.randn(64, 40, generator=g) / 8


def sample(n):
    """Places on the map, and what the sensors see of them."""
    place = torch.rand(n, 3) * 2 - 1
    return place, torch.tanh(place @ lift1) @ lift2 + 0.02 * torch.randn(n, 40)


def distances(z):
    squares = ((z[:, None, :] - z[None, :, :]) ** 2).sum(-1)
    return torch.sqrt(squares) if bad else torch.sqrt(squares + 1e-8)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(40, 128), nn.SiLU(), nn.Linear(128, 128), nn.SiLU(), nn.Linear(128, 3)
        )

    def forward(self, x):
        return self.layers(x)


encoder = Encoder()
optimizer = torch.optim.AdamW(encoder.parameters(), lr=2e-3, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 150)
recent = []
for step in range(150):
    place, seen = sample(48)
    wanted = torch.cdist(place, place)
    loss = (distances(encoder(seen)) - wanted).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(encoder.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    recent.append(loss.item())
    if step % 25 == 0:
        print(f"{step:4d} {loss.item():.4f}")

print(f"final loss {sum(recent[-10:]) / 10:.4f}")
