"""A denoiser of 2-D points (diffusion), with FP8 weights that are cast once per update and a small Adam of our own."""
import os
import sys

import torch
import torch.nn.functional as F
from torch import nn

MODE = sys.argv[1]
PLAIN = "plain" in sys.argv[2:]
SEED = int(os.environ.get("SEED", 0))


class Linear8(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, w8):
        s = 448.0 / x.abs().amax().clamp(min=1e-12)
        x8 = (x * s).to(torch.float8_e4m3fn).float() / s
        ctx.save_for_backward(x8, w8)
        return x8 @ w8.t()

    @staticmethod
    def backward(ctx, g):
        x8, w8 = ctx.saved_tensors
        s = 57344.0 / g.abs().amax().clamp(min=1e-30)
        g8 = (g * s).to(torch.float8_e5m2).float() / s
        return g8 @ w8, g8.t() @ x8, None


class CachedLinear(nn.Linear):
    """Casts its weight again only if the weight has changed since the last call."""

    seen, cached = None, None

    def forward(self, x):
        if PLAIN:
            return super().forward(x)
        if self.seen != self.weight._version:
            w = self.weight.detach()
            s = 448.0 / w.abs().amax(1, keepdim=True)
            self.cached = (w * s).to(torch.float8_e4m3fn).float() / s
            self.seen = self.weight._version
        return Linear8.apply(x, self.weight, self.cached) + self.bias


class Adam:
    def __init__(self, parameters, lr, betas=(0.9, 0.99), eps=1e-8):
        self.parameters, self.lr, self.betas, self.eps, self.t = list(parameters), lr, betas, eps, 0
        self.m = [torch.zeros_like(p) for p in self.parameters]
        self.v = [torch.zeros_like(p) for p in self.parameters]

    @torch.no_grad()
    def step(self):
        self.t += 1
        b1, b2 = self.betas
        for p, m, v in zip(self.parameters, self.m, self.v):
            m.lerp_(p.grad, 1 - b1)
            v.lerp_(p.grad.square(), 1 - b2)
            update = (m / (1 - b1**self.t)) / ((v / (1 - b2**self.t)).sqrt() + self.eps)
            target = p.data if MODE == "bad" else p
            target.add_(update, alpha=-self.lr)
            p.grad = None


d = 128
torch.manual_seed(SEED)
model = nn.Sequential(CachedLinear(34, d), nn.SiLU(), CachedLinear(d, d), nn.SiLU(), CachedLinear(d, d), nn.SiLU(), nn.Linear(d, 2))
g = torch.Generator().manual_seed(80 + SEED)
frequency = torch.exp(torch.linspace(0, 4, 16))
optimizer = Adam(model.parameters(), lr=2e-3)
losses = []
for step in range(200):
    angle = 6.28 * torch.rand(256, generator=g)
    radius = 1 + 0.5 * (torch.rand(256, generator=g) > 0.5).float()
    x0 = torch.stack([radius * angle.cos(), radius * angle.sin()], -1)
    t = torch.rand(256, 1, generator=g)
    noise = torch.randn(256, 2, generator=g)
    xt = (0.5 * 3.1416 * t).cos() * x0 + (0.5 * 3.1416 * t).sin() * noise
    features = torch.cat([xt, (t * frequency).sin(), (t * frequency).cos()], -1)
    loss = F.mse_loss(model(features), noise)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 20 == 0:
        print(step, round(losses[-1], 4))
print("final loss", round(sum(losses[-25:]) / 25, 4))
