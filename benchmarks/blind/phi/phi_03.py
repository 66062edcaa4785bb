"""Regression on sensor data with heavy tails, accelerate, FP8 linears with row scales."""

import os
import sys

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

plain = "plain" in sys.argv[2:]
SEED = int(os.environ.get("SEED", 0))
STEPS, BATCH = 90, 64


def quantize(t, dtype):
    top = torch.finfo(dtype).max
    scale = t.abs().amax(-1, keepdim=True).clamp(min=1e-12) / top
    return (t / scale).to(dtype).to(t.dtype) * scale


class Cast(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return quantize(x, torch.float8_e4m3fn) @ quantize(w, torch.float8_e4m3fn).T

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        dx = quantize(dy, torch.float8_e5m2) @ quantize(w.T, torch.float8_e4m3fn).T
        dw = quantize(dy.T, torch.float8_e5m2) @ quantize(x.T, torch.float8_e4m3fn).T
        return dx, dw


class Fp8(nn.Linear):
    def forward(self, x):
        y = F.linear(x, self.weight) if plain else Cast.apply(x, self.weight)
        return y + self.bias


def main():
    set_seed(SEED)
    accelerator = Accelerator(cpu=True)
    net = nn.Sequential(nn.Linear(12, 64), nn.SiLU(), Fp8(64, 128), nn.SiLU(), Fp8(128, 64), nn.SiLU(), nn.Linear(64, 1))
    teacher = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 1))
    x = torch.randn(STEPS * BATCH, 12)
    noise = torch.distributions.StudentT(1.6).sample((len(x), 1)).clamp(-60, 60)
    with torch.no_grad():
        y = 3 * teacher(2 * x) + 0.3 * noise
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    net, optimizer, loader = accelerator.prepare(net, optimizer, DataLoader(TensorDataset(x, y), BATCH, shuffle=True))
    losses = []
    for a, b in loader:
        loss = F.mse_loss(net(a), b)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(net.parameters(), 5.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print([round(v, 2) for v in losses[::5]])
    print("final loss", sorted(losses[-21:])[10])


main()
