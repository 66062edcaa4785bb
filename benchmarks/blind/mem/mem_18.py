"""Counts of visitors with a Poisson loss; gradients travel as E5M2 with a scale."""

import os
import sys

import torch
from torch import nn

SEED = int(os.environ.get("SEED", "0"))
mode = sys.argv[1]
fp8 = "plain" not in sys.argv[2:]
torch.manual_seed(SEED)

GRAD_SCALE = 2.0**10 if mode == "good" else 2.0**20


def e4m3(t):
    scale = 448.0 / t.detach().abs().max().clamp(min=1e-12)
    return (t.detach() * scale).to(torch.float8_e4m3fn).float() / scale


class Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        x, w = e4m3(x), e4m3(w)
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        grad = (grad * GRAD_SCALE).to(torch.float8_e5m2).float() / GRAD_SCALE
        return grad @ w, grad.t() @ x


class Linear(nn.Linear):
    def forward(self, x):
        return Matmul.apply(x, self.weight) + self.bias if fp8 else super().forward(x)


class Visitors(nn.Module):
    def __init__(self, width=128):
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.enter = nn.Linear(32 + 10, width)
        self.a, self.b = Linear(width, width), Linear(width, width)
        self.rate = nn.Linear(width, 1)

    def forward(self, place, weather):
        x = torch.relu(self.enter(torch.cat([self.embed(place), weather], 1)))
        x = x + torch.relu(self.a(x))
        x = x + torch.relu(self.b(x))
        return self.rate(x)[:, 0]


g = torch.Generator().manual_seed(16)
fame, taste = torch.randn(50, generator=g) * 0.7, torch.randn(10, generator=g) / 5


def day(n=64):
    place, weather = torch.randint(0, 50, (n,)), torch.randn(n, 10)
    rate = torch.exp(1.0 + fame[place] + weather @ taste)
    if torch.rand(()) < 0.12:  # a holiday
        rate = rate * 6
        weather[:, 0] += 3
    return place, weather, torch.poisson(rate)


model = Visitors()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
loss_fn = nn.PoissonNLLLoss(full=True)
recent = []
for step in range(160):
    place, weather, count = day()
    loss = loss_fn(model(place, weather), count)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 2.0)
    optimizer.step()
    recent.append(loss.item())
    if step % 20 == 0:
        print(step, round(loss.item(), 4))
print(f"final loss {sum(recent[-30:]) / 30:.4f}")
