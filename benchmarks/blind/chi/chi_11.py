"""Mixed precision with a loss scale: a temporal conv net forecasts power demand, FP8 casts by hand in its 1x1 layers."""
import os
import sys

import torch
import torch.nn.functional as F
from torch import nn

MODE = sys.argv[1]
PLAIN = "plain" in sys.argv[2:]
SEED = int(os.environ.get("SEED", 0))


class Rowwise8(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dtype):
        limit = torch.finfo(dtype).max
        s = limit / x.abs().amax(-1, keepdim=True).clamp(min=1e-20)
        return (x * s).clamp(-limit, limit).to(dtype).to(x.dtype) / s

    @staticmethod
    def backward(ctx, g):
        return g, None


def fp8(x):
    return x if PLAIN else Rowwise8.apply(x, torch.float8_e4m3fn)


class Pointwise(nn.Linear):
    def forward(self, x):
        return F.linear(fp8(x), fp8(self.weight), self.bias)


class Forecaster(nn.Module):
    def __init__(self, d=48):
        super().__init__()
        self.inp = nn.Conv1d(1, d, 3, padding=1)
        self.temporal = nn.ModuleList(nn.Conv1d(d, d, 3, padding=2**i, dilation=2**i) for i in range(4))
        self.mixing = nn.ModuleList(Pointwise(d, d) for _ in range(4))
        self.out = nn.Linear(d, 8)

    def forward(self, x):
        h = self.inp(x[:, None])
        for conv, mix in zip(self.temporal, self.mixing):
            h = h + mix(F.relu(conv(h)).transpose(1, 2)).transpose(1, 2)
        return self.out(h[:, :, -1])


g = torch.Generator().manual_seed(190 + SEED)


def windows(n=64, history=72, ahead=8):
    t = torch.arange(history + ahead) + torch.randint(0, 168, (n, 1), generator=g)
    day, week = 6.283 * t / 24, 6.283 * t / 168
    level = torch.randn(n, 1, generator=g) * 0.3
    weight = 0.5 + torch.rand(n, 1, generator=g)
    y = level + weight * (day.sin() + 0.4 * (2 * day + 1).cos()) + 0.5 * week.sin()
    y = y + 0.1 * torch.randn(y.shape, generator=g)
    return y[:, :history], y[:, history:]


torch.manual_seed(SEED)
model = Forecaster()
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=4096.0, growth_interval=1000)
losses = []
for step in range(150):
    past, future = windows()
    loss = F.mse_loss(model(past), future)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    if MODE == "good":
        scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())
    if step % 25 == 0:
        print(f"step {step} loss {losses[-1]:.4f} scale {scaler.get_scale():.0f}")
print("final loss", round(sum(losses[-20:]) / 20, 4))
