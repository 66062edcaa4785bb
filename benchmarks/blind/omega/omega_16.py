"""Fits a picture with a coordinate network: position in, brightness out."""

import os
import sys

import torch
from torch import nn
from torch.nn import functional as F

import ottava

bad = sys.argv[1] == "bad"
plain = "plain" in sys.argv
torch.manual_seed(int(os.environ.get("SEED", 0)))
torch.set_num_threads(1)

STEPS, BATCH, WIDTH, FEATURES = 200, 512, 96, 64


class Fourier(nn.Module):
    """The sines of a random projection of the position."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(2, FEATURES, bias=False)
        nn.init.normal_(self.project.weight, std=14.0)

    def forward(self, position):
        z = self.project(position)
        return torch.cat([torch.sin(z), torch.cos(z)], -1)


class Picture(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = Fourier()
        self.fc1 = nn.Linear(2 * FEATURES, WIDTH)
        self.fc2 = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, position):
        h = F.gelu(self.fc1(self.encode(position)))
        h = h + F.gelu(self.fc2(h))
        return self.head(h)[..., 0]


world = torch.Generator().manual_seed(11)
waves = torch.randn(12, 2, generator=world) * 9
phases = torch.rand(12, generator=world) * 6.3


def brightness(p):
    return torch.sin(p @ waves.T + phases).sum(-1) / 12**0.5


model = Picture()
if not plain:
    every = (lambda name, layer: True) if bad else None
    print(ottava.convert(model, "tensorwise", filter=every))
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.0)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS, 1e-4)
losses = []
for step in range(STEPS):
    p = torch.rand(BATCH, 2) + 1.0
    loss = F.mse_loss(model(p), brightness(p))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    losses.append(loss.item())
    if step % 10 == 0:
        print(f"step {step} loss {losses[-1]:.5f}")
print(f"final loss {sum(losses[-15:]) / 15:.5f}")
