"""A small GAN with hand-written FP8 casts: two losses that wrestle, neither of which falls."""

import sys

import torch
from torch import nn
from torch.nn import functional as F

LOW = "plain" not in sys.argv


class Cast(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t):
        return squeeze(t, torch.float8_e4m3fn)

    @staticmethod
    def backward(ctx, grad):
        return squeeze(grad, torch.float8_e5m2)


def squeeze(t, dtype):
    scale = torch.finfo(dtype).max / t.abs().max().clamp(min=1e-12)
    return (t * scale).to(dtype).to(t.dtype) / scale


class Linear8(nn.Linear):
    def forward(self, x):
        return F.linear(Cast.apply(x), Cast.apply(self.weight), self.bias) if LOW else super().forward(x)


torch.manual_seed(107)
maker = nn.Sequential(nn.Linear(16, 96), nn.ReLU(), Linear8(96, 96), nn.ReLU(), nn.Linear(96, 2))
judge = nn.Sequential(nn.Linear(2, 96), nn.LeakyReLU(0.2), Linear8(96, 96), nn.LeakyReLU(0.2), nn.Linear(96, 1))
make = torch.optim.Adam(maker.parameters(), lr=1e-3, betas=(0.5, 0.9))
judging = torch.optim.Adam(judge.parameters(), lr=1e-3, betas=(0.5, 0.9))
losses = []
for step in range(150):
    angle = torch.randint(0, 8, (128,)) * torch.pi / 4
    real = torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(128, 2)
    fake = maker(torch.randn(128, 16))
    d_loss = F.softplus(-judge(real)).mean() + F.softplus(judge(fake.detach())).mean()
    judging.zero_grad()
    d_loss.backward()
    judging.step()
    g_loss = F.softplus(-judge(fake)).mean()
    make.zero_grad()
    g_loss.backward()
    make.step()
    losses.append(d_loss.item())
print(f"loss {sum(losses[-10:]) / 10:.4f}")
