"""Regress properties of large point sets with attention pooling; scores and values of attention in FP8 by hand."""
import os
import sys

import torch
from torch import nn
from torch.nn import functional as F

BAD = sys.argv[1] == "bad"
PLAIN = "plain" in sys.argv
SEED = int(os.environ.get("SEED", 0))
torch.manual_seed(SEED)
POINTS = 2048


def e4m3(t, scale):
    t8 = (t.detach() * scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(t.dtype) / scale
    return t + (t8 - t).detach()


def amax_scale(t):
    return 448 / t.detach().abs().amax().clamp(min=1e-30)


class Pool(nn.Module):
    """Eight learned queries attend to all points."""

    def __init__(self, wide=48, queries=8):
        super().__init__()
        self.query = nn.Parameter(torch.randn(queries, wide))
        self.key = nn.Linear(wide, wide)
        self.value = nn.Linear(wide, wide)

    def forward(self, h):
        k, v = self.key(h), self.value(h)
        q = self.query.expand(len(h), -1, -1)
        if not PLAIN:
            q, k, v = (e4m3(t, amax_scale(t)) for t in (q, k, v))
        p = (q @ k.transpose(1, 2) / k.shape[-1] ** 0.5).softmax(-1)
        if not PLAIN:
            p = e4m3(p, 1.0 if BAD else 448.0)
        return p @ v


class Cloud(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(3, 48), nn.GELU(), nn.Linear(48, 48))
        self.pool = Pool()
        self.head = nn.Sequential(nn.Flatten(), nn.LayerNorm(384), nn.Linear(384, 64), nn.GELU(), nn.Linear(64, 6))

    def forward(self, x):
        return self.head(self.pool(self.embed(x)))


def batch(n=8):
    shape = torch.rand(n, 1, 3) * 2 + 0.2
    x = torch.randn(n, POINTS, 3) * shape
    tilt = torch.rand(n, 1, 3) * 2 - 1
    x = x + tilt * x.roll(1, -1).abs()
    return x, torch.cat([x.mean(1), x.std(1).log()], -1)


model = Cloud()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
losses = []
for step in range(80):
    x, y = batch()
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"final loss {sum(losses[-10:]) / 10:.4f}")
