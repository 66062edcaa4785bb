"""Two processes train one model on the records of two sites; gradients travel as FP8 codes."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

bad = sys.argv[1] == "bad"
plain = "plain" in sys.argv
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
seed = int(os.environ.get("SEED", 0))
torch.set_num_threads(1)

STEPS, BATCH, FEATURES = 150, 48, 40


def average(grad):
    """Mean of a gradient over the processes: every process sends its codes and their scale."""
    if plain:
        dist.all_reduce(grad)
        return grad / world
    scale = 57344.0 / grad.abs().amax().clamp(min=1e-20).reshape(1)
    codes = (grad * scale).to(torch.float8_e5m2)
    parts = [torch.empty_like(codes, dtype=torch.uint8) for _ in range(world)]
    dist.all_gather(parts, codes.view(torch.uint8))
    scales = [torch.empty_like(scale) for _ in range(world)]
    dist.all_gather(scales, scale)
    total = torch.zeros_like(grad)
    for part, sent in zip(parts, scales):
        total += part.view(torch.float8_e5m2).float() / (scale if bad else sent)
    return total / world


torch.manual_seed(seed)
model = nn.Sequential(nn.Linear(FEATURES, 96), nn.GELU(), nn.Linear(96, 96), nn.GELU(), nn.Linear(96, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
world_gen = torch.Generator().manual_seed(7)
direction = torch.randn(FEATURES, 6, generator=world_gen) / FEATURES**0.5
torch.manual_seed(1000 * seed + rank)


def batch(site):
    """Site 0 measures common cases; site 1 rare ones, further out."""
    x = torch.randn(BATCH, FEATURES)
    if site == 1:
        x = x + 0.5
    y = torch.sin(2 * x @ direction[:, :3]).sum(1) + (x @ direction[:, 3:]).sum(1)
    if site == 1:
        y = 8 * y + 5
    return x, y[:, None]


losses = []
for step in range(STEPS):
    x, y = batch(rank)
    loss = F.smooth_l1_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    for p in model.parameters():
        p.grad.copy_(average(p.grad))
    optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    losses.append(mean.item() / world)
    if step % 10 == 0 and rank == 0:
        print(f"step {step} loss {losses[-1]:.4f}")
torch.manual_seed(99)
held = [batch(site) for site in (0, 1) for _ in range(10)]
with torch.no_grad():
    test = torch.stack([F.smooth_l1_loss(model(x), y) for x, y in held]).mean()
dist.all_reduce(test)
print(f"rank {rank}: loss on records of both sites {test.item() / world:.4f}")
if rank == 0:
    print(f"final loss {test.item() / world:.4f}")
dist.destroy_process_group()
