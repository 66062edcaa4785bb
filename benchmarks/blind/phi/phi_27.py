"""accelerate with a GradScaler, because the gradients of our linears travel in E5M2."""

import os
import sys

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

bad, plain = sys.argv[1] == "bad", "plain" in sys.argv[2:]
SEED = int(os.environ.get("SEED", 0))
STEPS, BATCH = 100, 96
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def saturate(t, dtype, scale):
    top = torch.finfo(dtype).max
    return (t * scale).clamp(-top, top).to(dtype).to(t.dtype) / scale


def current(t, dtype):
    return torch.finfo(dtype).max / t.abs().max().clamp(min=1e-12)


class Linear8(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        x, w = saturate(x, E4M3, current(x, E4M3)), saturate(w, E4M3, current(w, E4M3))
        ctx.save_for_backward(x, w)
        return x @ w.T

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        dy = saturate(dy, E5M2, 1.0 if bad else current(dy, E5M2))
        return dy @ w, dy.T @ x


class Layer(nn.Linear):
    def forward(self, x):
        return super().forward(x) if plain else Linear8.apply(x, self.weight) + self.bias


def main():
    set_seed(SEED)
    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(
        nn.Linear(24, 96), nn.GELU(), Layer(96, 96), nn.GELU(), Layer(96, 96), nn.GELU(), Layer(96, 96), nn.GELU(),
        nn.Linear(96, 16),
    )
    first, second = torch.randn(24, 40), torch.randn(40, 16)
    x = torch.randn(STEPS * BATCH, 24)
    y = (torch.tanh(x @ first / 3) @ second).argmax(-1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    model, loader = accelerator.prepare(model, DataLoader(TensorDataset(x, y), BATCH, shuffle=True))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18, growth_interval=2)
    losses = []
    for a, b in loader:
        loss = F.cross_entropy(model(a), b)
        optimizer.zero_grad()
        accelerator.backward(scaler.scale(loss))
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    print([round(v, 2) for v in losses[::8]], scaler.get_scale())
    print("final loss", sum(losses[-10:]) / 10)


main()
