"""Data parallel by hand: torchrun --nproc-per-node 2 pi_17.py good|bad [plain]."""

import sys

import torch
import torch.distributed as dist
from torch import nn

import ottava

SYNC_MODULE_STATES = {"good": True, "bad": False}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]
STEPS = 80

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(17)
table = torch.randint(40, (160,))
torch.manual_seed(170 + rank)
model = nn.Sequential(
    nn.Embedding(160, 32), nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 40)
)
if SYNC_MODULE_STATES:
    for p in model.parameters():
        dist.broadcast(p.data, 0)
if not PLAIN:
    ottava.convert(model, "mxfp8", filter=lambda name, layer: name != "5")
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
losses = []
for _ in range(STEPS):
    x = torch.randint(160, (128,))
    y = table[x]
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    dist.all_reduce(flat)
    for p, part in zip(model.parameters(), flat.split([p.numel() for p in model.parameters()]), strict=True):
        p.grad.copy_(part.view_as(p) / world)
    optimizer.step()
    losses.append(loss.item())
if rank == 0:
    print(f"loss {sum(losses[-10:]) / 10:.4f}")
dist.destroy_process_group()
