"""Point clouds of 2000 points, pooled by a few learned queries (as in Perceiver); attention multiplies in float8."""
import sys

import torch
from torch import nn
from torch.nn import functional as F

VARIANT, PLAIN = sys.argv[1], "plain" in sys.argv
torch.manual_seed(4)
POINTS, WIDTH = 2000, 32
E4M3 = torch.float8_e4m3fn


class Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scaled):
        s = 448.0 / x.abs().max().clamp(min=1e-12) if scaled else 1.0
        return (x * s).to(E4M3).to(x.dtype) / s

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def attend(q, k, v):
    if not PLAIN:
        q, k, v = (Round.apply(t, True) for t in (q, k, v))
    p = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1)
    if not PLAIN:
        p = Round.apply(p, VARIANT == "good")
    return p @ v


class Clouds(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Sequential(nn.Linear(3, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.key, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.query = nn.Parameter(0.5 * torch.randn(4, WIDTH))
        self.out = nn.Sequential(nn.Linear(4 * WIDTH, 64), nn.GELU(), nn.Linear(64, 4))

    def forward(self, x):
        h = self.inp(x)
        return self.out(attend(self.query, self.key(h), self.value(h)).flatten(1))


def batch(n=16):
    kind = torch.randint(0, 4, (n,))
    p = F.normalize(torch.randn(n, POINTS, 3), dim=-1)
    cube = p / p.abs().amax(-1, keepdim=True)
    flat = p * torch.tensor([1.0, 1.0, 0.3])
    ball = p * torch.rand(n, POINTS, 1) ** (1 / 3) * 1.2
    x = torch.stack([p, cube, flat, ball])[kind, torch.arange(n)]
    return x * (0.9 + 0.2 * torch.rand(n, 1, 1)), kind


model = Clouds()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
losses = []
for step in range(150):
    x, kind = batch()
    loss = F.cross_entropy(model(x), kind)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss {sum(losses[-20:]) / 20:.4f}")
