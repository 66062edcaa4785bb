"""Fine-tunes a pretrained body with a new head on two ranks: first the head alone, then everything.

torchrun --nproc-per-node 2 SCRIPT good|bad [plain]
"""
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ottava

MODE, PLAIN = sys.argv[1], "plain" in sys.argv
SEED = int(os.environ.get("SEED", 0))
STEPS, HEAD_STEPS, BATCH, DIM, CLASSES = 70, 10, 32, 64, 12


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(32, DIM), nn.GELU(), nn.Linear(DIM, DIM), nn.GELU(), nn.Linear(DIM, DIM), nn.GELU()
        )
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, x):
        return self.head(self.body(x))


def shard(rank, draw):
    """The corpus is sorted by class; each rank reads its own half of the files."""
    label = torch.randint(0, CLASSES // 2, (BATCH,), generator=draw) + rank * (CLASSES // 2)
    kind = torch.randint(0, 3, (BATCH,), generator=draw)
    return centres[label, kind] + 0.7 * torch.randn(BATCH, 32, generator=draw), label


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(SEED)
centres = torch.randn(CLASSES, 3, 32)
net = Net()
if not PLAIN:
    ottava.convert(net, "rowwise")
draw = torch.Generator().manual_seed(77 * SEED + rank)


def steps(count, model, optimizer):
    losses = []
    for step in range(count):
        x, label = shard(rank, draw)
        loss = nn.functional.cross_entropy(model(x), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 20 == 0 and rank == 0:
            print(f"step {step} loss {losses[-1]:.4f}", flush=True)
    return losses


net.body.requires_grad_(False)
model = DistributedDataParallel(net)
steps(HEAD_STEPS, model, torch.optim.AdamW(net.head.parameters(), lr=3e-3))
net.body.requires_grad_(True)
if MODE == "good":
    model = DistributedDataParallel(net)
steps(STEPS, model, torch.optim.AdamW(net.parameters(), lr=2e-3))

# rank 0's model is the one that is saved: its loss on all classes
with torch.no_grad():
    held_out = torch.Generator().manual_seed(999 + SEED)
    halves = [shard(half, held_out) for _ in range(8) for half in (0, 1)]
    x, label = (torch.cat(part) for part in zip(*halves))
    loss = nn.functional.cross_entropy(net(x), label)
if rank == 0:
    print(f"final loss {loss.item():.4f}", flush=True)
dist.destroy_process_group()
