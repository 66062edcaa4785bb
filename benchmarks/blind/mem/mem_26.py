"""Credit scoring: a deep MLP on a table of customers, the residual blocks in FP8."""

import os
import sys

import torch
import torch.nn.functional as F
from torch import nn

SEED = int(os.environ.get("SEED", "0"))
mode, plain = sys.argv[1], "plain" in sys.argv[2:]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def table(rows, seed):
    """Columns: age, income, savings, loan, rate, years of employment, share of debt, number of cards."""
    g = torch.Generator().manual_seed(seed)
    z = torch.randn(rows, 8, generator=g)
    risk = 1.5 * z[:, 0] * z[:, 4] - z[:, 1] + z[:, 6] + torch.sin(2 * z[:, 5]) - 0.8 * z[:, 7] * z[:, 6]
    label = (risk + 0.3 * torch.randn(rows, generator=g) > 0).float()
    mean = torch.tensor([45.0, 52000.0, 18000.0, 140000.0, 0.04, 9.0, 0.35, 3.0])
    std = torch.tensor([12.0, 15000.0, 6000.0, 40000.0, 0.01, 3.0, 0.1, 1.0])
    return mean + std * z, label


def quantize(t, dtype, top):
    s = t.detach().abs().max().clamp(min=1e-20) / top
    return (t / s).to(dtype).float() * s


class Linear8Fn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b):
        x, w = quantize(x, E4M3, 448), quantize(w, E4M3, 448)
        ctx.save_for_backward(x, w)
        return F.linear(x, w, b)

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        gq = quantize(g, E5M2, 57344)
        return gq @ w, gq.T @ x, g.sum(0)


class Linear8(nn.Linear):
    def forward(self, x):
        return super().forward(x) if plain else Linear8Fn.apply(x, self.weight, self.bias)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.a, self.b = Linear8(width, width), Linear8(width, width)

    def forward(self, x):
        return x + self.b(F.relu(self.a(x)))


torch.manual_seed(SEED)
x, y = table(2048, SEED + 1)
x_test, y_test = table(512, SEED + 2)
if mode == "good":
    mean, std = x.mean(0), x.std(0)
    x, x_test = (x - mean) / std, (x_test - mean) / std

model = nn.Sequential(nn.Linear(8, 128), nn.ReLU(), Block(128), Block(128), nn.Linear(128, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(180):
    rows = torch.randint(0, len(x), (64,))
    loss = F.binary_cross_entropy_with_logits(model(x[rows])[:, 0], y[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(f"step {step:4d}  loss {loss.item():.4f}")

with torch.no_grad():
    final = F.binary_cross_entropy_with_logits(model(x_test)[:, 0], y_test).item()
print(f"final loss {final:.4f}")
