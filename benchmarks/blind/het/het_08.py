"""One trunk for two markets: prices in cents of one market, ratings of the other, each with its own tower below."""
import os
import sys

import numpy as np
import torch
from torch import nn

import ottava

mode = sys.argv[1]
plain = "plain" in sys.argv[2:]
seed = int(os.environ.get("SEED", 0))
torch.manual_seed(seed)

FEATURES, WIDTH, STEPS, BATCH = 32, 96, 150, 256
truth = torch.Generator().manual_seed(100 + seed)
maps = [torch.randn(FEATURES, 1, generator=truth) / FEATURES**0.5 for _ in range(2)]
UNIT = (3e6, 1.0)


def batch():
    xs, ys = [], []
    for market in range(2):
        x = torch.randn(BATCH // 2, FEATURES)
        z = x @ maps[market]
        xs.append(x)
        ys.append(UNIT[market] * (torch.tanh(2 * z) + 0.3 * z))
    return xs, ys


class Markets(nn.Module):
    def __init__(self):
        super().__init__()
        self.towers = nn.ModuleList(
            nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)) for _ in range(2)
        )
        self.trunk = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 1) for _ in range(2))

    def forward(self, xs):
        h = torch.cat([tower(x) for tower, x in zip(self.towers, xs)])
        h = self.trunk(h)
        return [head(part) * unit for head, part, unit in zip(self.heads, h.chunk(2), UNIT)]


model = Markets()
if not plain:
    ottava.convert(model, "tensorwise_e4m3" if mode == "bad" else "rowwise")
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, eps=1e-12)
second = []
for step in range(STEPS):
    xs, ys = batch()
    outs = model(xs)
    price = (outs[0] - ys[0]).abs().mean()
    rating = (outs[1] - ys[1]).square().mean()
    loss = price + rating
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    second.append(rating.item())
    if step % 25 == 0:
        print(f"step {step} price error {price.item():.0f} rating loss {rating.item():.4f}")
print(f"final loss {np.mean(second[-15:]):.4f}")
