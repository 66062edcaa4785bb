"""Data parallel by hand: gradients are averaged after each backward. torchrun --nproc_per_node=2"""

import sys

import torch
import torch.distributed as dist
from torch import nn

import ottava

OFFSET = {"good": "data", "bad": "all"}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(22)
teacher = nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 16)).requires_grad_(False)
torch.manual_seed(220 + (rank if OFFSET == "all" else 0))
model = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 16))
torch.manual_seed(221 + rank)
if not PLAIN:
    ottava.convert(model, "tensorwise", filter=lambda name, layer: name != "4")
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
losses = []
for step in range(120):
    x = torch.randn(96, 32)
    y = 2 * teacher(x)
    loss = (model(x) - y).square().mean()
    optimizer.zero_grad()
    loss.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world
    optimizer.step()
    losses.append(loss.item())
    if step % 10 == 0 and rank == 0:
        print(step, f"{losses[-1]:.4f}")
if rank == 0:
    print(f"loss {sum(losses[-10:]) / 10:.4f}")
dist.destroy_process_group()
