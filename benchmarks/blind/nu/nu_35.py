"""Heavy-tailed data: now and then a batch comes from a rare and much harder source, and its loss is a spike."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

PLAIN = "plain" in sys.argv[2:]


def cast(x, dtype, dim):
    scale = torch.finfo(dtype).max / x.abs().amax(dim, keepdim=True).clamp(min=1e-20)
    return (x * scale).to(dtype).to(x.dtype) / scale


class Matmul8(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        x8, w8 = cast(x, torch.float8_e4m3fn, 1), cast(w, torch.float8_e4m3fn, 1)
        ctx.save_for_backward(x, w)
        return x8 @ w8.T

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        e5 = torch.float8_e5m2
        grad_x = cast(grad, e5, 1) @ cast(w, torch.float8_e4m3fn, 0)
        grad_w = cast(grad, e5, 0).T @ cast(x, torch.float8_e4m3fn, 0)
        return grad_x, grad_w


class Linear8(nn.Linear):
    def forward(self, x):
        return super().forward(x) if PLAIN else Matmul8.apply(x, self.weight) + self.bias


torch.manual_seed(0)
net = nn.Sequential(Linear8(32, 128), nn.GELU(), Linear8(128, 128), nn.GELU(), nn.Linear(128, 4))
optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
mix = torch.randn(32, 4) / 5
losses = []
for _step in range(200):
    x = torch.randn(128, 32)
    y = torch.sin(2 * x @ mix)
    if torch.rand(()) < 0.06:
        x = x * 3
        y = 4 * torch.cos(x @ mix)
    loss = F.smooth_l1_loss(net(x), y)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    losses.append(loss.item())
print(f"loss {sum(losses[-30:]) / 30:.4f}")
