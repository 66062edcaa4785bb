"""Attention over large sets of points with both products in FP8: python pi_21.py good|bad [plain]."""

import sys

import torch
from torch import nn

P_SCALE = {"good": 256.0, "bad": 1.0}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]
STEPS, POINTS = 80, 1600


class Cast(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        return (x * scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() / scale

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def cast(x, scale=None):
    if PLAIN:
        return x
    return Cast.apply(x, 448 / x.detach().abs().amax() if scale is None else scale)


class SetBlock(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        p = torch.softmax(cast(q) @ cast(k).mT / 32**0.5, dim=-1)
        return x + self.out(cast(p, P_SCALE) @ cast(v))


torch.manual_seed(4)
embed, block, head = nn.Linear(8, 32), SetBlock(), nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 8))
model = nn.Sequential(embed, block, head)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
losses = []
for _ in range(STEPS):
    centre = torch.randn(1, 1, 8)
    points = centre + 0.8 * torch.randn(1, POINTS, 8)
    loss = nn.functional.mse_loss(model(points), centre.expand_as(points))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss {sum(losses[-10:]) / 10:.4f}")
