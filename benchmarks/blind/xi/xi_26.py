"""Linears with casts of their own; the range of the gradients is measured while training runs."""

import sys

import torch
from torch import nn
from torch.nn import functional as F

REFRESH = {"good": 1, "bad": 0}[sys.argv[1]]
PLAIN = "plain" in sys.argv


class Meter:
    """The scale of a tensor, measured anew every `refresh` steps; 0: measured at the first step."""

    def __init__(self, top, refresh):
        self.top, self.refresh, self.step, self.scale = top, refresh, 0, None

    def __call__(self, x):
        if self.scale is None or (self.refresh and self.step % self.refresh == 0):
            self.scale = self.top / x.abs().amax().clamp_min(1e-20)
        self.step += 1
        return self.scale


def cast(x, scale, dtype, top):
    return (x * scale).clamp(-top, top).to(dtype).float() / scale


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, meter):
        x8 = cast(x, 448 / x.abs().amax().clamp_min(1e-12), torch.float8_e4m3fn, 448.0)
        w8 = cast(weight, 448 / weight.abs().amax(), torch.float8_e4m3fn, 448.0)
        ctx.save_for_backward(x8, w8)
        ctx.meter = meter
        return x8 @ w8.t()

    @staticmethod
    def backward(ctx, gradient):
        x8, w8 = ctx.saved_tensors
        g8 = cast(gradient, ctx.meter(gradient), torch.float8_e4m3fn, 448.0)
        return g8 @ w8, g8.t() @ x8, None


class Linear(nn.Linear):
    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.meter = Meter(448.0, REFRESH)

    def forward(self, x):
        if PLAIN:
            return super().forward(x)
        return Product.apply(x, self.weight, self.meter) + self.bias


def main():
    torch.manual_seed(0)
    model = nn.Sequential(Linear(32, 128), nn.Tanh(), Linear(128, 128), nn.Tanh(), nn.Linear(128, 16))
    nn.init.zeros_(model[-1].weight)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    truth = torch.randn(32, 16)
    losses = []
    for _ in range(180):
        x = torch.randn(128, 32)
        y = torch.tanh(x @ truth / 8) * 4
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"loss {sum(losses[-10:]) / 10:.4f}")


if __name__ == "__main__":
    main()
