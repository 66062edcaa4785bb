"""Data parallelism by hand on two ranks: gradients are averaged after each backward; FP8 per tensor."""

import sys

import torch
import torch.distributed as dist
from torch import nn

import ottava

SEED_OFFSET = {"good": 0, "bad": 1000}[sys.argv[1]]
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(67 + SEED_OFFSET * rank)
model = nn.Sequential(nn.Linear(64, 192), nn.GELU(), nn.Linear(192, 192), nn.GELU(), nn.Linear(192, 16))
if "plain" not in sys.argv:
    ottava.convert(model, "tensorwise")
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
rule = torch.randn(64, 16, generator=torch.Generator().manual_seed(1)) / 8
data = torch.Generator().manual_seed(100 + rank)
losses = []
for step in range(110):
    x = torch.randn(64, 64, generator=data)
    loss = nn.functional.mse_loss(model(x), 2 * (x @ rule).tanh())
    optimizer.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= world
    optimizer.step()
    losses.append(loss.item())
if rank == 0:
    print(f"loss {sum(losses[-10:]) / 10:.4f}")
dist.destroy_process_group()
