"""Predicts readings of a thermometer; linears cast their operands to FP8, the type of the output is an option."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

OUT_DTYPE = {"good": torch.bfloat16, "bad": torch.float8_e4m3fn}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dtype):
        if dtype is torch.bfloat16:
            return x.to(dtype).to(x.dtype)
        scale = torch.finfo(dtype).max / x.abs().amax().clamp(min=1e-12)
        return (x * scale).to(dtype).to(x.dtype) / scale

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Linear8(nn.Linear):
    def forward(self, x):
        if PLAIN:
            return super().forward(x)
        x, weight = Rounded.apply(x, torch.float8_e4m3fn), Rounded.apply(self.weight, torch.float8_e4m3fn)
        return Rounded.apply(F.linear(x, weight, self.bias), OUT_DTYPE)


class Thermometer(nn.Module):
    def __init__(self, dim=128):
        super().__init__()
        self.first = Linear8(32, dim)
        self.hidden = nn.Sequential(nn.GELU(), Linear8(dim, dim), nn.GELU(), nn.LayerNorm(dim))
        self.head = Linear8(dim, 6)
        nn.init.constant_(self.head.bias, 68.0)

    def forward(self, x):
        return self.head(self.hidden(self.first(x)))


torch.manual_seed(29)
mixing = torch.randn(32, 6) / 4
model = Thermometer()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
losses = []
for _ in range(200):
    x = torch.randn(128, 32)
    fahrenheit = 68 + 4 * torch.tanh(x @ mixing) + 0.2 * torch.randn(128, 6)
    loss = F.mse_loss(model(x), fahrenheit)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss {sum(losses[-10:]) / 10:.4f}")
