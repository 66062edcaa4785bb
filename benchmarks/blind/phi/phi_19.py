"""Heavy Nesterov momentum without warmup: the loss swings before it settles. FP8 with delayed scales."""

import os
import sys

import torch
import torch.nn.functional as F
from torch import nn

plain = "plain" in sys.argv[2:]
SEED = int(os.environ.get("SEED", 0))
torch.manual_seed(SEED)
STEPS, BATCH = 100, 128


class Delayed:
    """A scale for the next cast from the amaxes of the last ones, with an octave of room."""

    def __init__(self, dtype):
        self.dtype, self.top, self.seen = dtype, torch.finfo(dtype).max, []

    def __call__(self, t):
        now = max(t.abs().max().item(), 1e-12)
        amax = max(self.seen) if self.seen else now
        self.seen = [*self.seen[-7:], now]
        scale = self.top / (2 * max(amax, now / 2))
        return (t * scale).clamp(-self.top, self.top).to(self.dtype).to(t.dtype) / scale


class Step(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, casts):
        xq, wq = casts[0](x), casts[1](w)
        ctx.save_for_backward(xq, wq)
        ctx.cast = casts[2]
        return xq @ wq.T

    @staticmethod
    def backward(ctx, g):
        xq, wq = ctx.saved_tensors
        gq = ctx.cast(g)
        return gq @ wq, gq.T @ xq, None


class Fp8Linear(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.casts = [Delayed(torch.float8_e4m3fn), Delayed(torch.float8_e4m3fn), Delayed(torch.float8_e5m2)]

    def forward(self, x):
        return super().forward(x) if plain else Step.apply(x, self.weight, self.casts) + self.bias


model = nn.Sequential(nn.Linear(20, 96), nn.Tanh(), Fp8Linear(96, 96), nn.Tanh(), Fp8Linear(96, 96), nn.Tanh(), nn.Linear(96, 12))
teacher = nn.Sequential(nn.Linear(20, 24), nn.Tanh(), nn.Linear(24, 12))
with torch.no_grad():
    for p in teacher.parameters():
        p.mul_(4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.15, momentum=0.97, nesterov=True)
losses = []
for step in range(STEPS):
    x = torch.randn(BATCH, 20)
    with torch.no_grad():
        y = teacher(x).argmax(-1)
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 10 == 0:
        print(step, losses[-1])
print("final loss", sum(losses[-10:]) / 10)
