"""A switch layer (each token to one expert) with a capacity, on a stream whose topics change."""

import os
import sys

import torch
import torch.nn.functional as F
from torch import nn

MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]
torch.manual_seed(int(os.environ.get("SEED", "0")))
WIDTH, EXPERTS, STEPS, CAPACITY = 48, 6, 180, 72


class Cast(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        sx = 448 / x.abs().amax(1, keepdim=True).clamp(min=1e-12)
        sw = 448 / w.abs().amax(1, keepdim=True).clamp(min=1e-12)
        qx, qw = (x * sx).to(torch.float8_e4m3fn).float() / sx, (w * sw).to(torch.float8_e4m3fn).float() / sw
        ctx.save_for_backward(qx, qw)
        return qx @ qw.t()

    @staticmethod
    def backward(ctx, g):
        qx, qw = ctx.saved_tensors
        s = 28672 / g.abs().amax(1, keepdim=True).clamp(min=1e-20)
        q = (g * s).to(torch.float8_e5m2).float() / s
        return q @ qw, q.t() @ qx


class Linear(nn.Linear):
    def forward(self, x):
        return super().forward(x) if PLAIN else Cast.apply(x, self.weight) + self.bias


class Switch(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(
            nn.Sequential(Linear(WIDTH, 96), nn.GELU(), Linear(96, WIDTH)) for _ in range(EXPERTS)
        )

    def forward(self, x):
        gate = self.router(x).softmax(1)
        weight, chosen = gate.max(1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            token = (chosen == i).nonzero().squeeze(1)[:CAPACITY]  # the rest is dropped
            if len(token):
                out = out.index_add(0, token, expert(x[token]) * weight[token, None])
        share = F.one_hot(chosen, EXPERTS).float().mean(0)
        return x + out, EXPERTS * (share * gate.mean(0)).sum()


maps = torch.randn(12, WIDTH, WIDTH) / WIDTH**0.5
marks = 1.5 * torch.randn(12, WIDTH)
switch, norm = Switch(), nn.LayerNorm(WIDTH)
out = nn.Linear(WIDTH, WIDTH)
parameters = [*switch.parameters(), *norm.parameters(), *out.parameters()]
optimizer = torch.optim.Adam(parameters, lr=3e-3)
losses = []
for step in range(STEPS):
    topics = torch.randperm(12)[:4] if step % 3 else torch.arange(12)
    topic = topics[torch.randint(0, len(topics), (256,))]
    x = marks[topic] + torch.randn(256, WIDTH)
    y = torch.einsum("nd,nde->ne", x, maps[topic])
    hidden, balance = switch(norm(x))
    loss = F.mse_loss(out(hidden), y) + 0.01 * balance
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 20 == 0:
        print(step, f"{losses[-1]:.4f}")
print(f"final loss {sum(losses[-30:]) / 30:.4f}")
