"""Linears cast by hand in forward and backward; the loss is a mean over many outputs."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

GRAD_SCALING = {"good": "dynamic", "bad": "none"}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]


def cast(x, dtype, scaling):
    scale = torch.finfo(dtype).max / x.abs().amax().clamp(min=1e-20) if scaling == "dynamic" else 1.0
    return (x * scale).to(dtype).to(x.dtype) / scale


class Matmul8(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        x8, w8 = cast(x, torch.float8_e4m3fn, "dynamic"), cast(w, torch.float8_e4m3fn, "dynamic")
        ctx.save_for_backward(x8, w8)
        return x8 @ w8.T

    @staticmethod
    def backward(ctx, grad):
        x8, w8 = ctx.saved_tensors
        grad = cast(grad, torch.float8_e4m3fn, GRAD_SCALING)
        return grad @ w8, grad.T @ x8


class Linear8(nn.Linear):
    def forward(self, x):
        return super().forward(x) if PLAIN else Matmul8.apply(x, self.weight) + self.bias


torch.manual_seed(0)
net = nn.Sequential(Linear8(64, 192), nn.GELU(), Linear8(192, 192), nn.GELU(), nn.Linear(192, 64))
optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3, eps=1e-12)
first, second = torch.randn(64, 12) / 8, torch.randn(12, 64) / 3
losses = []
for _step in range(160):
    x = torch.randn(256, 64)
    y = F.relu(2 * x @ first) @ second
    loss = F.mse_loss(net(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss {sum(losses[-10:]) / 10:.4f}")
