"""Two processes train one regressor; each has the records of its own region. torchrun --nproc-per-node 2."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ottava

MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]
SEED = int(os.environ.get("SEED", "0"))
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
STEPS = 120


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(32, 128), nn.SiLU(), nn.Linear(128, 128), nn.SiLU())
        self.head = nn.Linear(128, 1)

    def encode(self, x):
        return self.body(x)

    def forward(self, x):
        return self.head(self.encode(x)).squeeze(1)

    def loss(self, x, y):
        return nn.functional.huber_loss(self(x), y)


class WithLoss(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x, y):
        return self.net.loss(x, y)


torch.manual_seed(SEED)
model = Regressor()
a, b = torch.randn(32) / 3, torch.randn(32, 2) / 3
shift = 1.5 * torch.randn(32)
if not PLAIN:
    ottava.convert(model, "mxfp8")
ddp = DistributedDataParallel(WithLoss(model))
optimizer = torch.optim.AdamW(ddp.parameters(), lr=2e-3)
generator = torch.Generator().manual_seed(1000 * SEED + rank)


def region(which, n):
    x = torch.randn(n, 32, generator=generator) + (shift if which else -shift)
    return x, 3 * torch.sin(x @ a) + (x @ b).prod(1)


for step in range(STEPS):
    x, y = region(rank, 128)
    loss = ddp(x, y) if MODE == "good" else ddp.module.net.loss(x, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0 and step % 20 == 0:
        print(step, f"{loss.item():.4f}", flush=True)

with torch.no_grad():
    tests = [model.loss(*region(which, 1000)) for which in range(world)]
total = torch.stack(tests).mean()
dist.all_reduce(total)
if rank == 0:
    print("both regions, mean of the ranks:")
    print(f"final loss {total.item() / world:.4f}")
dist.barrier()
del ddp
dist.destroy_process_group()
