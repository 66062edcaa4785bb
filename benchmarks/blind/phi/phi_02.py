"""Residual MLP with rowwise FP8 linears of our own."""

import os
import sys

import torch
import torch.nn.functional as F
from torch import nn

bad, plain = sys.argv[1] == "bad", "plain" in sys.argv[2:]
SEED = int(os.environ.get("SEED", 0))
torch.manual_seed(SEED)
WIDTH, BATCH, STEPS = 96, 192, 90


def rowwise(t, dtype=torch.float8_e4m3fn):
    top = torch.finfo(dtype).max
    scale = t.abs().amax(-1, keepdim=True).clamp(min=1e-12) / top
    return (t / scale).clamp(-top, top).to(dtype), scale


class RowwiseLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        xq, xs = rowwise(x)
        wq, ws = rowwise(w)
        ctx.save_for_backward(x, w, wq, ws)
        return (xq.float() @ wq.float().T) * xs * ws.T

    @staticmethod
    def backward(ctx, dy):
        x, w, wq, ws = ctx.saved_tensors
        gq, gs = rowwise(dy)
        if bad:
            dx = (gq.float() @ wq.float()) * gs * ws.T
        else:
            tq, ts = rowwise(w.T.contiguous())
            dx = (gq.float() @ tq.float().T) * gs * ts.T
        gtq, gts = rowwise(dy.T.contiguous())
        xtq, xts = rowwise(x.T.contiguous())
        return dx, (gtq.float() @ xtq.float().T) * gts * xts.T


class Linear(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight) if plain else RowwiseLinear.apply(x, self.weight)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = Linear(WIDTH, WIDTH, bias=False), Linear(WIDTH, WIDTH, bias=False)
        with torch.no_grad():
            # units start at different gains, as after a pruned checkpoint
            self.up.weight.mul_(torch.randn(WIDTH, 1).exp())
            self.down.weight.mul_(torch.randn(WIDTH, 1).mul(1.5).exp())

    def forward(self, x):
        return self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, x):
        x = self.inner(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


teacher = nn.Sequential(nn.Linear(16, 48), nn.Tanh(), nn.Linear(48, 10))
with torch.no_grad():
    teacher[0].weight.mul_(2)
    teacher[2].weight.mul_(6)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
losses = []
for step in range(STEPS):
    x = torch.randn(BATCH, 16)
    with torch.no_grad():
        y = teacher(x).argmax(-1)
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    losses.append(loss.item())
    if step % 10 == 0:
        print(step, losses[-1])
print("final loss", sum(losses[-10:]) / 10)
