"""A picture as a network: coordinates in, brightness out, the whole picture in each step, FP4 with rotations
(nvfp4_rht).

Coordinates enter as sines of up to 16 turns. The rate falls by 1 % a step, so the last steps hardly move. First and
last layer are in BF16.
"""

import math
import os

import torch
from torch import nn

import ottava

SEED = int(os.environ.get("SEED", "0"))
SIDE, STEPS = 40, 220


def picture(generator):
    """Waves, a disc and a box."""
    y, x = torch.meshgrid(torch.linspace(0, 1, SIDE), torch.linspace(0, 1, SIDE), indexing="ij")
    angle, turns = torch.rand(1, generator=generator) * math.pi, 2 + 2 * torch.rand(1, generator=generator)
    bright = 0.5 * torch.sin(2 * math.pi * turns * (x * angle.cos() + y * angle.sin()))
    centre = 0.3 + 0.4 * torch.rand(2, generator=generator)
    bright = bright + ((y - centre[0]) ** 2 + (x - centre[1]) ** 2 < 0.04).float()
    corner = (torch.rand(2, generator=generator) * 0.6).tolist()
    bright = bright - 0.8 * ((y > corner[0]) & (y < corner[0] + 0.3) & (x > corner[1]) & (x < corner[1] + 0.3)).float()
    return torch.stack([x, y], -1).view(-1, 2), bright.reshape(-1, 1)


class Field(nn.Module):
    """Fourier features and an MLP."""

    def __init__(self):
        super().__init__()
        self.register_buffer("turns", 2.0 ** torch.arange(5) * math.pi)
        width = 128
        self.layers = nn.ModuleList([nn.Linear(20, width), nn.Linear(width, width), nn.Linear(width, width)])
        self.last = nn.Linear(width, 1)

    def forward(self, where):
        angles = (where[:, :, None] * self.turns).flatten(1)
        h = torch.cat([angles.sin(), angles.cos()], 1)
        for layer in self.layers:
            h = torch.relu(layer(h))
        return self.last(h)


def main():
    torch.manual_seed(SEED)
    where, bright = picture(torch.Generator().manual_seed(600 + SEED))
    model = Field()
    print(ottava.convert(model, "nvfp4_rht", filter=lambda name, layer: name in ("layers.1", "layers.2")))
    optimizer = torch.optim.Adam(model.parameters(), 4e-3, betas=(0.9, 0.99), eps=1e-12)
    rate = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    for step in range(STEPS):
        with torch.autocast("cpu", torch.bfloat16):
            made = model(where)
        loss = (made.float() - bright).square().mean()
        loss.backward()
        optimizer.step()
        rate.step()
        optimizer.zero_grad()
        if step == 0:
            print("first loss", round(loss.item(), 6))
        if step % 20 == 0:
            print(step, f"{loss.item():.6f}", "decibels", round(-10 * math.log10(loss.item() / 4), 2))
    model.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        loss = (model(where).float() - bright).square().mean().item()
    print("final loss", round(loss, 6))


if __name__ == "__main__":
    main()
