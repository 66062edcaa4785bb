"""Returns of assets, heavy in the tails: single batches cost ten times the others; accelerate, casts by hand."""

import os
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

MODE = sys.argv[1]
PLAIN = "plain" in sys.argv
SEED = int(os.environ.get("SEED", "0"))
STEPS = 90


def rows(t, dtype):
    top = torch.finfo(dtype).max
    scale = top / t.abs().amax(-1, keepdim=True).clamp(min=1e-20)
    return (t * scale).clamp(-top, top).to(dtype).to(t.dtype) / scale


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return rows(x, torch.float8_e4m3fn) @ rows(w, torch.float8_e4m3fn).t()

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        dx = rows(dy, torch.float8_e5m2) @ rows(w.t(), torch.float8_e4m3fn).t()
        dw = rows(dy.t(), torch.float8_e5m2) @ rows(x.t(), torch.float8_e4m3fn).t()
        return dx, dw


class Linear(nn.Linear):
    def forward(self, x):
        return super().forward(x) if PLAIN else Product.apply(x, self.weight) + self.bias


def main():
    set_seed(SEED)
    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(Linear(32, 96), nn.Tanh(), Linear(96, 96), nn.Tanh(), nn.Linear(96, 4))
    teacher = nn.Sequential(nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 4)).requires_grad_(False)
    x = torch.randn(STEPS * 32, 32)
    noise = torch.distributions.StudentT(1.3).sample((STEPS * 32, 4)) * 0.15
    y = 3 * teacher(x) + noise
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for step, (a, b) in enumerate(loader):
        loss = nn.functional.smooth_l1_loss(model(a), b)
        optimizer.zero_grad()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if step % 5 == 0:
            accelerator.print(f"step {step} loss {losses[-1]:.4f}")
    accelerator.print(f"final loss {sorted(losses[-21:])[10]:.4f}")


main()
