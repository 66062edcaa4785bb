"""Residual MLP on a smooth regression; operands are cast row by row, formats are an option."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FORWARD, BACKWARD = {"good": (E4M3, E5M2), "bad": (E5M2, E4M3)}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]


def through(x, dtype):
    scale = torch.finfo(dtype).max / x.abs().amax(-1, keepdim=True).clamp(min=1e-20)
    return (x * scale).to(dtype).to(x.dtype) / scale


class Matmul8(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        x, weight = through(x, FORWARD), through(weight, FORWARD)
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad = through(grad, BACKWARD)
        return grad @ weight, grad.t() @ x


class Linear(nn.Linear):
    def forward(self, x):
        return super().forward(x) if PLAIN else Matmul8.apply(x, self.weight) + self.bias


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), Linear(dim, 2 * dim), Linear(2 * dim, dim)

    def forward(self, x):
        return x + self.down(F.silu(self.up(self.norm(x))))


torch.manual_seed(113)
frequencies = torch.randn(6, 8) / 5
model = nn.Sequential(Linear(6, 96), *(Block(96) for _ in range(2)), nn.LayerNorm(96), Linear(96, 8))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
losses = []
for _ in range(200):
    x = torch.randn(192, 6)
    loss = F.mse_loss(model(x), torch.cos(x @ frequencies))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    losses.append(loss.item())
print(f"loss {sum(losses[-10:]) / 10:.5f}")
