"""Microvolt signals through RMS norms; casts by hand with a scale for each row."""
import os
import sys

import torch
from torch import nn
from torch.nn import functional as F

SEED = int(os.environ.get("SEED", "0"))
MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]
EPS = 1e-16 if MODE == "good" else 1e-5


def rows8(t, dtype=torch.float8_e4m3fn):
    s = torch.finfo(dtype).max / t.abs().amax(-1, keepdim=True).clamp(min=1e-20)
    return (t * s).to(dtype).to(t.dtype) / s


class RowMM(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        xq, wq = rows8(x), rows8(w)
        ctx.save_for_backward(xq, wq)
        return xq @ wq.t()

    @staticmethod
    def backward(ctx, g):
        xq, wq = ctx.saved_tensors
        gq = rows8(g)
        return gq @ wq, gq.t() @ xq


class RowLinear(nn.Linear):
    def forward(self, x):
        return super().forward(x) if PLAIN else RowMM.apply(x, self.weight) + self.bias


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.up, self.down, self.norm = RowLinear(dim, dim * 2), RowLinear(dim * 2, dim), nn.RMSNorm(dim, eps=EPS)

    def forward(self, x):
        return x + self.down(F.silu(self.up(self.norm(x))))


torch.manual_seed(SEED)
net = nn.Sequential(nn.RMSNorm(48, eps=EPS), RowLinear(48, 64), Block(64), Block(64), nn.RMSNorm(64, eps=1e-6), nn.Linear(64, 6))
shapes = torch.randn(6, 48)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
tail = []
for step in range(90):
    y = torch.randint(0, 6, (64,))
    gain = torch.exp(torch.randn(64, 1)) * 1e-6
    x = (shapes[y] + 1.5 * torch.randn(64, 48)) * gain
    loss = F.cross_entropy(net(x), y)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    tail.append(loss.item())
    if step % 15 == 0:
        print(step, round(loss.item(), 4))
print(f"final loss {sum(tail[-10:]) / 10:.4f}")
