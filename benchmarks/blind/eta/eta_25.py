"""Two ranks under DDP with two micro-batches a step; each rank has half of the kinds. FP8."""

import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import ottava

mode, plain = sys.argv[1], "plain" in sys.argv
torch.manual_seed(37)
dist.init_process_group("gloo")
rank = dist.get_rank()
centres = torch.randn(16, 40)
net = nn.Sequential(nn.Linear(40, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 16))
if not plain:
    print(ottava.convert(net, "tensorwise"))
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
source = torch.Generator().manual_seed(rank)
held = torch.arange(16).repeat(16)
test = centres[held] + 1.2 * torch.randn(len(held), 40)
last = 1 if mode == "good" else 2
losses = []
for step in range(120):
    optimizer.zero_grad()
    for micro in range(2):
        kinds = torch.randint(0, 8, (32,), generator=source) + 8 * rank
        x = centres[kinds] + 1.2 * torch.randn(32, 40, generator=source)
        with nullcontext() if micro == last else model.no_sync():
            loss = F.cross_entropy(model(x).float(), kinds) / 2
            loss.backward()
    optimizer.step()
    losses.append(2 * loss.item())
    if step % 20 == 0 and rank == 0:
        print(f"step {step} loss {losses[-1]:.4f}")
with torch.no_grad():
    found = F.cross_entropy(net(test).float(), held).item()
if rank == 0:
    print(f"loss {found:.4f}")
dist.destroy_process_group()
