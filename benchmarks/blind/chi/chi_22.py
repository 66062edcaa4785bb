"""Contrastive: one encoder for a short clip (quiet) and for its studio recording (loud), FP8 linears of our own."""
import os
import sys

import torch
import torch.nn.functional as F
from torch import nn

MODE = sys.argv[1]
PLAIN = "plain" in sys.argv[2:]
SEED = int(os.environ.get("SEED", 0))


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, layer):
        layer.sx = 448.0 / x.abs().amax().clamp(min=1e-12)
        layer.sw = 448.0 / w.abs().amax().clamp(min=1e-12)
        x8, w8 = (x * layer.sx).to(torch.float8_e4m3fn), (w * layer.sw).to(torch.float8_e4m3fn)
        ctx.save_for_backward(x8, w8, layer.sx, layer.sw)
        ctx.layer = layer
        return x8.float() @ w8.float().t() / (layer.sx * layer.sw)

    @staticmethod
    def backward(ctx, g):
        x8, w8, sx, sw = ctx.saved_tensors
        if MODE == "bad":
            sx, sw = ctx.layer.sx, ctx.layer.sw
        sg = 57344.0 / g.abs().amax().clamp(min=1e-30)
        g8 = (g * sg).to(torch.float8_e5m2).float()
        return g8 @ w8.float() / (sg * sw), g8.t() @ x8.float() / (sg * sx), None


class Linear8(nn.Linear):
    def forward(self, x):
        return super().forward(x) if PLAIN else Product.apply(x, self.weight, self)


class Encoder(nn.Module):
    def __init__(self, n=64, d=128, out=32):
        super().__init__()
        self.first, self.second, self.third = (Linear8(*io, bias=False) for io in ((n, d), (d, d), (d, out)))

    def forward(self, x):
        return F.normalize(self.third(F.relu(self.second(F.relu(self.first(x))))), dim=-1)


g = torch.Generator().manual_seed(90 + SEED)
quiet_mix = torch.randn(24, 64, generator=g) / 5
loud_mix = torch.randn(24, 64, generator=g) / 5


def pairs(n=64):
    z = torch.randn(n, 24, generator=g)
    quiet = 0.1 * (torch.tanh(z @ quiet_mix) + 0.3 * torch.randn(n, 64, generator=g))
    loud = 50.0 * (torch.tanh(z @ loud_mix) + 0.3 * torch.randn(n, 64, generator=g))
    return quiet, loud


torch.manual_seed(SEED)
encoder = Encoder()
optimizer = torch.optim.AdamW(encoder.parameters(), lr=1e-3)
losses = []
for step in range(200):
    quiet, loud = pairs()
    order = (loud, quiet) if step % 2 else (quiet, loud)
    a, b = (encoder(x) for x in order)
    logits = a @ b.t() / 0.1
    target = torch.arange(len(logits))
    loss = (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target)) / 2
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 25 == 0:
        print(step, round(losses[-1], 4))
print("final loss", round(sum(losses[-20:]) / 20, 4))
