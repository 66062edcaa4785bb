"""A picture as a network of its coordinates, under ottava's rowwise recipe."""

import math
import os
import sys

import torch
import torch.nn.functional as F
from torch import nn

import ottava

bad, plain = sys.argv[1] == "bad", "plain" in sys.argv[2:]
SEED = int(os.environ.get("SEED", 0))
torch.manual_seed(SEED)
SIZE, STEPS, BATCH = 64, 100, 1024


class Picture(nn.Module):
    def __init__(self):
        super().__init__()
        self.phases = nn.Linear(2, 64)
        nn.init.normal_(self.phases.weight, std=2 * math.pi * 2.5)
        self.body = nn.Sequential(nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU())
        self.head = nn.Linear(128, 1)

    def forward(self, at):
        p = self.phases(at)
        return self.head(self.body(torch.cat([p.sin(), p.cos()], -1))).squeeze(-1)


axis = torch.linspace(-1, 1, SIZE)
grid = torch.stack(torch.meshgrid(axis, axis, indexing="ij"), -1).reshape(-1, 2)
waves = torch.randn(8, 2) * 9
image = torch.sin(grid @ waves.T + 6 * torch.rand(8)).mean(-1) * 2

model = Picture()
if not plain:
    kept = ("head",) if bad else ("phases", "head")
    ottava.convert(model, "rowwise", filter=lambda name, layer: name not in kept)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
losses = []
for step in range(STEPS):
    rows = torch.randint(0, len(grid), (BATCH,))
    loss = F.mse_loss(model(grid[rows]), image[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 10 == 0:
        print(step, losses[-1])
print("final loss", sum(losses[-10:]) / 10)
