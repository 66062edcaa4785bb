"""A small convolutional net on two ranks under DDP; the data set lies in memory and is put in a new order each epoch.

Run: torchrun --nproc_per_node 2 shapes_ddp.py good
"""
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from models import Report

BAD = sys.argv[1] == "bad"


def order(n, seed):
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed))


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
shapes = F.interpolate(torch.randn(8, 1, 4, 4), size=(12, 12), mode="bilinear")
labels = torch.randint(0, 8, (2000,))
images = shapes[labels] + 0.9 * torch.randn(2000, 1, 12, 12)
images, labels = images[rank::world], labels[rank::world]

model = DistributedDataParallel(nn.Sequential(
    nn.Conv2d(1, 24, 3), nn.BatchNorm2d(24), nn.ReLU(), nn.Conv2d(24, 32, 3, stride=2), nn.ReLU(),
    nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 8)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
report, seed = Report(quiet=True), 17
for epoch in range(8):
    x = images[order(1000, seed + epoch)]
    y = labels[order(1000, seed + epoch + (rank if BAD else 0))]
    for a, b in zip(x.split(50), y.split(50)):
        loss = F.cross_entropy(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        both = loss.detach().clone()
        dist.all_reduce(both)
        report.add(both / world)
        if rank == 0 and len(report.losses) % 20 == 0:
            print(f"epoch {epoch} mean loss of the ranks {both / world:.4f}", flush=True)
report.quiet = rank > 0
report.end()
dist.destroy_process_group()
