"""Data parallel by hand on two ranks: gradients are averaged with all_reduce.

torchrun --nproc_per_node 2 nu_29.py good
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import ottava

SEED_OFFSET = {"good": 0, "bad": 1}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(7 + SEED_OFFSET * rank)
net = nn.Sequential(
    nn.Embedding(48, 32),
    nn.Flatten(),
    nn.Linear(96, 192),
    nn.GELU(),
    nn.Linear(192, 192),
    nn.GELU(),
    nn.Linear(192, 48),
)
if not PLAIN:
    ottava.convert(net, "tensorwise")
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
rule = torch.randperm(48, generator=torch.Generator().manual_seed(1))
generator = torch.Generator().manual_seed(100 + rank)
losses = []
for _step in range(70):
    x = torch.randint(0, 48, (64, 3), generator=generator)
    loss = F.cross_entropy(net(x), rule[x[:, 1]])
    optimizer.zero_grad()
    loss.backward()
    for parameter in net.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= world
    optimizer.step()
    losses.append(loss.item())
if rank == 0:
    print(f"loss {sum(losses[-10:]) / 10:.4f}")
dist.destroy_process_group()
