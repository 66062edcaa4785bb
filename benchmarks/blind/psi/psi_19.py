"""Data parallel on two ranks; each rank reads its own shard of users. Linears multiply in FP8."""
import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

mode, plain = sys.argv[1], "plain" in sys.argv
seed = int(os.environ.get("SEED", 0))
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(seed)
DIM, CLASSES, BATCH, STEPS = 32, 16, 32, 150
F8 = torch.float8_e4m3fn


class Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448
        return (x / scale).to(F8).to(x.dtype) * scale

    @staticmethod
    def backward(ctx, grad):
        return grad


class Linear8(nn.Linear):
    def forward(self, x):
        if plain:
            return super().forward(x)
        return F.linear(Round.apply(x), Round.apply(self.weight), self.bias)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(Linear8(DIM, 128), nn.GELU(), Linear8(128, 128), nn.GELU())
        self.head = nn.Linear(128, CLASSES)

    def forward(self, x):
        return self.head(self.body(x))

    def loss(self, x, y):
        return F.cross_entropy(self(x), y)


teacher = nn.Sequential(nn.Linear(DIM, 48), nn.Tanh(), nn.Linear(48, CLASSES, bias=False))
shift = torch.randn(world, DIM)
model = DistributedDataParallel(Classifier())
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
held_out = torch.Generator().manual_seed(seed + 77)


def labelled(x):
    with torch.no_grad():
        return x, (6 * teacher(x)).argmax(-1)


torch.manual_seed(100 * seed + rank)
losses = []
for step in range(STEPS):
    x, y = labelled(torch.randn(BATCH, DIM) + 1.2 * shift[rank])
    if mode == "bad":
        loss = model.module.loss(x, y)
    else:
        loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    losses.append(loss.item())
    if rank == 0 and step % 30 == 0:
        print(f"step {step} loss {loss.item():.4f}", flush=True)

with torch.no_grad():
    total = torch.zeros(())
    for other in range(world):
        x, y = labelled(torch.randn(1000, DIM, generator=held_out) + 1.2 * shift[other])
        total += F.cross_entropy(model.module(x), y) / world
dist.barrier()
if rank == 0:
    print(f"final loss {total.item():.4f}")
dist.destroy_process_group()
