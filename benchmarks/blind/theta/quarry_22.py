"""Data parallel by hand on two ranks: gradients cross the wire as E4M3. Run: torchrun --nproc_per_node=2 SCRIPT good|bad [plain]"""
import sys

import torch
import torch.distributed as dist
from torch import nn

MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]
WIRE = {"good": {"scale": "group"}, "bad": {"scale": "rank"}}[MODE]

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


def reduce(grad):
    """The mean over the ranks. The codes are gathered as bytes, as gloo adds no FP8."""
    if PLAIN:
        dist.all_reduce(grad)
        return grad / world
    amax = grad.abs().amax().clamp(min=1e-12)
    if WIRE["scale"] == "group":
        dist.all_reduce(amax, dist.ReduceOp.MAX)
    scale = 448.0 / amax
    codes = (grad * scale).to(torch.float8_e4m3fn).view(torch.uint8)
    parts = [torch.empty_like(codes) for _ in range(world)]
    dist.all_gather(parts, codes)
    total = sum(part.view(torch.float8_e4m3fn).float() for part in parts)
    return total / scale / world


torch.manual_seed(6)
width = 96
model = nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 8))
teacher = nn.Sequential(nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 8)).requires_grad_(False)
for p in teacher.parameters():
    p.mul_(3.0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
mine = torch.Generator().manual_seed(100 + rank)
spread = [0.25, 1.6][rank]  # the ranks read from different sources
losses = []
for step in range(200):
    x = torch.randn(64, 64, generator=mine) * spread
    loss = (model(x) - teacher(x)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    for p in model.parameters():
        p.grad = reduce(p.grad)
    optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    losses.append(mean.item() / world)
if rank == 0:
    print(f"first {losses[0]:.4f}")
    print(f"loss {sum(losses[-10:]) / 10:.4f}")
dist.destroy_process_group()
