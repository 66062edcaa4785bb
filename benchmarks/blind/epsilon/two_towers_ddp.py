"""When a shop orders an article again (a day number), by two towers on two ranks; gradients travel in FP8 through a
hook of DDP.

Run: torchrun --nproc_per_node 2 two_towers_ddp.py good
"""
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from models import Report, to_fp8

BAD = sys.argv[1] == "bad"


def exchange(flat):
    """Mean over ranks of a flat gradient, sent as FP8 codes with this rank's scale."""
    codes, scale = to_fp8(flat)
    world = dist.get_world_size()
    all_codes = [torch.empty_like(codes.view(torch.uint8)) for _ in range(world)]
    all_scales = [torch.empty_like(scale) for _ in range(world)]
    dist.all_gather(all_codes, codes.view(torch.uint8))
    dist.all_gather(all_scales, scale)
    return sum(c.view(codes.dtype).float() * s for c, s in zip(all_codes, all_scales)) / world


def hook(state, bucket):
    parts = [bucket.buffer()] if BAD else [g.flatten() for g in bucket.gradients()]
    for part in parts:
        part.copy_(exchange(part))
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


class Towers(nn.Module):
    def __init__(self, users=60, items=50, dim=64):
        super().__init__()
        self.user, self.item = nn.Embedding(users, dim), nn.Embedding(items, dim)
        self.user_net = nn.Sequential(nn.Linear(dim, 128), nn.ReLU(), nn.Linear(128, dim))
        self.item_net = nn.Sequential(nn.Linear(dim, 128), nn.ReLU(), nn.Linear(128, dim))
        self.level = nn.Parameter(torch.tensor(1.0))

    def forward(self, u, i):
        a, b = self.user_net(self.user(u)), self.item_net(self.item(i))
        return (a * b).sum(-1) / 8 + 20_000 * self.level


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
taste, kind = torch.randn(60, 3), torch.randn(50, 3)
model = DistributedDataParallel(Towers())
model.register_comm_hook(None, hook)
level = model.module.level
optimizer = torch.optim.Adam([
    {"params": [p for p in model.parameters() if p is not level], "lr": 3e-3},
    {"params": [level], "lr": 1e-6}])
data = torch.Generator().manual_seed(100 + rank)
report = Report(quiet=rank > 0)
for step in range(160):
    u = torch.randint(0, 60, (512,), generator=data)
    i = torch.randint(0, 50, (512,), generator=data)
    day = 20_003 + 2 * torch.tanh((taste[u] * kind[i]).sum(-1) / 2)
    loss = F.mse_loss(model(u, i), day)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    report.add(loss.detach())
report.end()
dist.destroy_process_group()
