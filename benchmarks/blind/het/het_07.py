"""Two ranks, each with the files of its own site, micro-batches and DistributedDataParallel."""
import os
import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ottava

mode = sys.argv[1]
plain = "plain" in sys.argv[2:]
seed = int(os.environ.get("SEED", 0))
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

FEATURES, CLASSES, STEPS, MICRO, BATCH = 48, 12, 80, 2, 48
torch.manual_seed(seed)
centers = torch.randn(CLASSES, FEATURES) * 0.8
model = nn.Sequential(
    nn.Linear(FEATURES, 96), nn.GELU(), nn.Linear(96, 96), nn.GELU(), nn.Linear(96, CLASSES)
)
if not plain:
    ottava.convert(model, "tensorwise")
ddp = DistributedDataParallel(model)
torch.manual_seed(1000 * seed + rank)


def batch(classes):
    labels = torch.as_tensor(classes)[torch.randint(0, len(classes), (BATCH,))]
    x = centers[labels] * (1 + 0.2 * torch.randn(BATCH, 1)) + torch.randn(BATCH, FEATURES)
    return x, labels


site = list(range(CLASSES))[rank::world]
optimizer = torch.optim.AdamW(ddp.parameters(), lr=2e-3)
for step in range(STEPS):
    optimizer.zero_grad()
    for micro in range(MICRO):
        x, labels = batch(site)
        last = micro == (MICRO - 1 if mode == "good" else MICRO)
        with nullcontext() if last else ddp.no_sync():
            loss = F.cross_entropy(ddp(x), labels) / MICRO
            loss.backward()
    optimizer.step()
    if rank == 0 and step % 10 == 0:
        print(f"step {step} loss {loss.item() * MICRO:.4f}", flush=True)

torch.manual_seed(5)
with torch.no_grad():
    held = torch.stack([F.cross_entropy(model(x), labels) for x, labels in [batch(range(CLASSES)) for _ in range(10)]])
if rank == 0:
    print(f"final loss {held.mean().item():.4f}", flush=True)
dist.barrier()
dist.destroy_process_group()
