"""ZeRO-1 by hand on two ranks: each one steps its share of one flat buffer. torchrun --nproc_per_node=2 SCRIPT good|bad [plain]"""
import sys

import torch
import torch.distributed as dist
from torch import nn

import ottava

MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]
BUCKET = {"good": 1, "bad": 4096}[MODE]  # shares end on multiples of it

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(10)
width, classes = 80, 32
model = nn.Sequential(nn.Linear(64, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, classes))
if not PLAIN:
    ottava.convert(model, "rowwise", filter=lambda name, layer: name == "2")
params = list(model.parameters())
size = sum(p.numel() for p in params)
share = size // world // BUCKET * BUCKET
flat = torch.cat([p.detach().flatten() for p in params])
master = flat[rank * share : (rank + 1) * share].clone()
optimizer = torch.optim.AdamW([master], lr=3e-3)
centres = torch.randn(classes, 64)
mine = torch.Generator().manual_seed(50 + rank)
losses = []
for step in range(160):
    y = torch.randint(classes, (64,), generator=mine)
    x = centres[y] + 2.0 * torch.randn(64, 64, generator=mine)
    loss = nn.functional.cross_entropy(model(x), y)
    model.zero_grad()
    loss.backward()
    grads = torch.cat([p.grad.flatten() for p in params])
    dist.all_reduce(grads)
    master.grad = grads[rank * share : (rank + 1) * share] / world
    optimizer.step()
    parts = [torch.empty_like(master) for _ in range(world)]
    dist.all_gather(parts, master)
    flat[: world * share] = torch.cat(parts)
    at = 0
    with torch.no_grad():
        for p in params:
            p.copy_(flat[at : at + p.numel()].view_as(p))
            at += p.numel()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    losses.append(mean.item() / world)
if rank == 0:
    print(f"first {losses[0]:.4f}")
    print(f"loss {sum(losses[-10:]) / 10:.4f}")
dist.destroy_process_group()
