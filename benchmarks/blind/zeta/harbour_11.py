"""Two clinics, two ranks: one has easy cases, the other hard ones. Gradients travel as BF16.

torchrun --nproc-per-node 2 SCRIPT good [plain]
"""
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import ottava

PLAIN = "plain" in sys.argv
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(108)
model = nn.Sequential(nn.Linear(32, 96), nn.GELU(), nn.Linear(96, 96), nn.GELU(), nn.Linear(96, 5))
if not PLAIN:
    ottava.convert(model, "blockwise")
ddp = DistributedDataParallel(model)


def half_the_bytes(state, bucket):
    wire = (bucket.buffer() / dist.get_world_size()).bfloat16()
    work = dist.all_reduce(wire, async_op=True).get_future()
    return work.then(lambda f: bucket.buffer().copy_(f.value()[0]))


if not PLAIN:
    ddp.register_comm_hook(None, half_the_bytes)
optimizer = torch.optim.AdamW(ddp.parameters(), lr=2e-3)
centres = torch.randn(5, 32, generator=torch.Generator().manual_seed(1))
own = torch.Generator().manual_seed(7 + rank)
losses = []
for step in range(200):
    kind = torch.randint(0, 5, (32,), generator=own)
    x = centres[kind] + (2.5, 1.0)[rank] * torch.randn(32, 32, generator=own)
    loss = F.cross_entropy(ddp(x), kind)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
if rank == 0:
    print(f"start {sum(losses[:20]) / 20:.4f}")
    print(f"loss {sum(losses[-20:]) / 20:.4f}")
dist.destroy_process_group()
