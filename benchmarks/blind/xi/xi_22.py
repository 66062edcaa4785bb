"""A classifier under cosine annealing with warm restarts, each to a high rate; E4M3 casts in its linears."""

import sys

import torch
from torch import nn
from torch.nn import functional as F

PLAIN = "plain" in sys.argv


class Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dtype, top):
        scale = top / x.abs().amax().clamp_min(1e-12)
        return (x * scale).to(dtype).to(x.dtype) / scale

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None, None


class RoundGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        scale = 57344 / gradient.abs().amax().clamp_min(1e-20)
        return (gradient * scale).to(torch.float8_e5m2).to(gradient.dtype) / scale


class Linear8(nn.Linear):
    def forward(self, x):
        x = Round.apply(x, torch.float8_e4m3fn, 448.0)
        weight = Round.apply(self.weight, torch.float8_e4m3fn, 448.0)
        return RoundGradient.apply(F.linear(x, weight, self.bias))


def main():
    torch.manual_seed(0)
    linear = nn.Linear if PLAIN else Linear8
    model = nn.Sequential(linear(32, 128), nn.ReLU(), linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=30, eta_min=1e-3)
    truth = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 10))
    losses = []
    for _ in range(200):
        x = torch.randn(64, 32)
        y = (truth(x) * 12 + torch.randn(64, 10)).argmax(-1)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    print(f"loss {sum(losses[-10:]) / 10:.4f}")


if __name__ == "__main__":
    main()
