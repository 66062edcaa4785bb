"""Meter readings of mixed lengths on two ranks; own all-reduce of FP8 gradients, one scale a tensor and rank,
weighted by valid readings.

Run: torchrun --nproc_per_node 2 readings_ddp.py good
"""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from models import E5M2, Report, to_fp8


class Meter(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        self.enter = nn.Linear(8, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.leave = nn.Linear(dim, 1)

    def forward(self, x):
        return self.leave(self.rnn(F.gelu(self.enter(x)))[0])[..., 0]


def add_up(g):
    """Sum over the ranks of a gradient that travels as FP8."""
    codes, scale = to_fp8(g, E5M2)
    codes = codes.view(torch.uint8)
    all_codes = [torch.empty_like(codes) for _ in range(dist.get_world_size())]
    all_scales = [torch.empty_like(scale) for _ in range(dist.get_world_size())]
    dist.all_gather(all_codes, codes)
    dist.all_gather(all_scales, scale)
    return sum(c.view(E5M2).float() * s for c, s in zip(all_codes, all_scales))


def draw(n, generator):
    x = torch.randn(n, 20, 8, generator=generator)
    y = torch.tanh(x[..., 0].cumsum(1) / 3) + 0.5 * x[..., 1] * x[..., 2]
    length = torch.randint(3, 21, (n, 1), generator=generator)
    return x, y, (torch.arange(20) < length).float()


dist.init_process_group("gloo")
torch.manual_seed(0)
model = Meter()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
own = torch.Generator().manual_seed(10 + dist.get_rank())
report = Report(quiet=dist.get_rank() > 0)
for step in range(150):
    x, y, valid = draw(48, own)
    error = ((model(x) - y).square() * valid).sum()
    totals = torch.stack([error.detach(), valid.sum()])
    optimizer.zero_grad()
    error.backward()
    dist.all_reduce(totals)
    for p in model.parameters():
        p.grad = add_up(p.grad) / totals[1]
    optimizer.step()
    report.add(totals[0] / totals[1])
report.end()
dist.destroy_process_group()
