"""DDP with accumulation over four micro-batches (no_sync in all but the last), ottava's delayed scaling. torchrun --nproc_per_node=2 SCRIPT good [plain]"""
import contextlib
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ottava

PLAIN = "plain" in sys.argv[2:]
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(14)
width, classes, micro = 96, 24, 4
net = nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, classes))
if not PLAIN:
    ottava.convert(net, "delayed", filter=lambda name, layer: name == "2")
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
centres = torch.randn(classes, 64)
mine = torch.Generator().manual_seed(rank)
losses = []
for step in range(100):
    optimizer.zero_grad()
    total = 0.0
    for part in range(micro):
        y = torch.randint(classes, (16,), generator=mine)
        x = centres[y] + (1.8 + 0.8 * rank) * torch.randn(16, 64, generator=mine)
        with model.no_sync() if part < micro - 1 else contextlib.nullcontext():
            loss = nn.functional.cross_entropy(model(x), y) / micro
            loss.backward()
        total += loss.item()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    losses.append(total)
if rank == 0:
    print(f"first {losses[0]:.4f}")
    print(f"loss {sum(losses[-10:]) / 10:.4f}")
dist.destroy_process_group()
