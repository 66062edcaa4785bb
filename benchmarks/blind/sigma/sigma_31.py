"""Data parallelism by hand over gloo: gradients are averaged after each backward; row scales by hand."""
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

SEED = int(os.environ.get("SEED", "0"))
MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]
dist.init_process_group("gloo")
RANK, WORLD = dist.get_rank(), dist.get_world_size()


def cast(t, dtype):
    s = torch.finfo(dtype).max / t.abs().amax(-1, keepdim=True).clamp(min=1e-12)
    return (t * s).to(dtype).to(t.dtype) / s


class MM8(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        x, w = cast(x, torch.float8_e4m3fn), cast(w, torch.float8_e4m3fn)
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        g = cast(g, torch.float8_e5m2)
        return g @ w, g.t() @ x


class Linear8(nn.Linear):
    def forward(self, x):
        return super().forward(x) if PLAIN else MM8.apply(x, self.weight) + self.bias


torch.manual_seed(SEED * 100 + RANK)
net = nn.Sequential(Linear8(32, 64), nn.GELU(), Linear8(64, 64), nn.GELU(), Linear8(64, 64), nn.GELU(), nn.Linear(64, 12))
if MODE == "good":
    for p in net.parameters():
        dist.broadcast(p.data, 0)
world = torch.Generator().manual_seed(SEED + 77)
centers = torch.randn(36, 32, generator=world)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
tail = []
for step in range(80):
    pick = torch.randint(0, 36, (48,))
    x = centers[pick] + 0.7 * torch.randn(48, 32)
    loss = F.cross_entropy(net(x), pick % 12)
    optimizer.zero_grad()
    loss.backward()
    flat = torch.cat([p.grad.flatten() for p in net.parameters()])
    dist.all_reduce(flat)
    start = 0
    for p in net.parameters():
        p.grad.copy_(flat[start : start + p.numel()].view_as(p) / WORLD)
        start += p.numel()
    optimizer.step()
    tail.append(loss.item())
    if RANK == 0 and step % 15 == 0:
        print(step, round(loss.item(), 4))
if RANK == 0:
    print(f"final loss {sum(tail[-10:]) / 10:.4f}")
dist.destroy_process_group()
