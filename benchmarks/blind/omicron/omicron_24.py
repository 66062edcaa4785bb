"""Two ranks with gradients that are reduced by hand."""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import ottava

SEED_PER_RANK = {"good": False, "bad": True}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(41)
centres = torch.randn(24, 64)
torch.manual_seed(1000 + (rank if SEED_PER_RANK else 0))
model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 24))
if not PLAIN:
    ottava.convert(model, "tensorwise")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = torch.Generator().manual_seed(50 + rank)
losses = []
for _ in range(120):
    label = torch.randint(24, (32,), generator=data)
    x = centres[label] + 1.5 * torch.randn(32, 64, generator=data)
    loss = F.cross_entropy(model(x).float(), label)
    optimizer.zero_grad()
    loss.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world
    optimizer.step()
    losses.append(loss.item())
if rank == 0:
    print(f"loss {sum(losses[-10:]) / 10:.4f}")
dist.destroy_process_group()
