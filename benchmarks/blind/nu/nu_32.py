"""Regression of a temperature in kelvin; the listed layers cast their output, too."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

CAST_OUTPUT_OF = {"good": ["0", "2"], "bad": ["0", "2", "4"]}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]


class Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        scale = 448 / x.abs().amax().clamp(min=1e-12)
        return (x * scale).to(torch.float8_e4m3fn).to(x.dtype) / scale

    @staticmethod
    def backward(ctx, grad):
        return grad


class Linear8(nn.Linear):
    cast_output = False

    def forward(self, x):
        if PLAIN:
            return super().forward(x)
        y = F.linear(Round.apply(x), Round.apply(self.weight), self.bias)
        return Round.apply(y) if self.cast_output else y


torch.manual_seed(0)
net = nn.Sequential(Linear8(24, 128), nn.GELU(), Linear8(128, 128), nn.GELU(), Linear8(128, 1))
with torch.no_grad():
    net[4].bias.fill_(288.0)
for name, layer in net.named_children():
    if isinstance(layer, Linear8):
        layer.cast_output = name in CAST_OUTPUT_OF
optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=0.0)
teacher = torch.randn(24, 3) / 5
losses = []
for _step in range(180):
    x = torch.randn(192, 24)
    h = x @ teacher
    y = 288 + 6 * h[:, 0] + 3 * torch.sin(2 * h[:, 1]) + 2 * h[:, 2] ** 2 + 0.3 * torch.randn(192)
    loss = F.mse_loss(net(x).squeeze(1), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss {sum(losses[-10:]) / 10:.4f}")
