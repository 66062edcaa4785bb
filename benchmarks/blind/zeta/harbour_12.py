"""Fits a two-link arm's position, weights held in one byte each; the optimizer writes them back after each step."""
import sys

import torch
from torch import nn
from torch.nn import functional as F

import ottava

VARIANT, PLAIN = sys.argv[1], "plain" in sys.argv
torch.manual_seed(8)
model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 2))
if not PLAIN:
    print(ottava.convert(model, "blockwise", weights="fp8", keep_high_precision=True))
waves = torch.randn(2, 32) * 1.5


class Momentum:
    """Adam without weight decay; knows how to write to a weight of codes."""

    def __init__(self, params, lr):
        self.params, self.lr, self.t = list(params), lr, 0
        self.m = [torch.zeros(p.shape) for p in self.params]
        self.v = [torch.zeros(p.shape) for p in self.params]
        self.copy = {}
        for i, p in enumerate(self.params):
            if VARIANT == "good" and hasattr(p, "requantize_"):
                self.copy[i] = p.high_precision.float()

    @torch.no_grad()
    def step(self):
        self.t += 1
        for i, p in enumerate(self.params):
            g = p.grad.float()
            self.m[i] += 0.1 * (g - self.m[i])
            self.v[i] += 0.01 * (g * g - self.v[i])
            m, v = self.m[i] / (1 - 0.9**self.t), self.v[i] / (1 - 0.99**self.t)
            update = self.lr * m / (v.sqrt() + 1e-8)
            if not hasattr(p, "requantize_"):
                p -= update
            elif i in self.copy:
                self.copy[i] -= update
                p.requantize_(self.copy[i])
            else:
                p.requantize_(p.dequantize() - update)

    def zero_grad(self):
        for p in self.params:
            p.grad = None


optimizer = Momentum(model.parameters(), lr=1e-3)
losses = []
for step in range(300):
    angle = torch.rand(64, 2) * 3
    x = torch.cat([(angle @ waves).sin(), (angle @ waves).cos()], 1)
    a, b = angle[:, 0], angle.sum(1)
    y = torch.stack([a.cos() + 0.7 * b.cos(), a.sin() + 0.7 * b.sin()], 1)
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss {sum(losses[-20:]) / 20:.5f}")
