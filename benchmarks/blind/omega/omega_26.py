"""DistributedDataParallel on two processes; each reads its own shard of a sorted file. ottava's linears."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import ottava

bad = sys.argv[1] == "bad"
plain = "plain" in sys.argv
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
seed = int(os.environ.get("SEED", 0))
torch.set_num_threads(1)

STEPS, BATCH, FEATURES, CLASSES = 120, 48, 32, 10


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(FEATURES, 96)
        self.mid = nn.Linear(96, 96)
        self.head = nn.Linear(96, CLASSES)

    def features(self, x):
        h = F.gelu(self.inp(x))
        return h + F.gelu(self.mid(h))

    def forward(self, x):
        return self.head(self.features(x))

    def loss(self, x, y):
        return F.cross_entropy(self(x), y, label_smoothing=0.02)


centres = torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(17)) * 0.7


def records(classes):
    y = classes[torch.randint(0, len(classes), (BATCH,))]
    return centres[y] + torch.randn(BATCH, FEATURES), y


torch.manual_seed(seed)
model = Tagger()
if not plain:
    ottava.convert(model, "tensorwise")
model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
torch.manual_seed(1000 * seed + rank)
shard = torch.arange(CLASSES).chunk(world)[rank]

for step in range(STEPS):
    x, y = records(shard)
    optimizer.zero_grad()
    if bad:
        loss = model.module.loss(x, y)
    else:
        loss = F.cross_entropy(model(x), y, label_smoothing=0.02)
    loss.backward()
    optimizer.step()
    if step % 10 == 0 and rank == 0:
        print(f"step {step} loss {loss.item():.4f}")

torch.manual_seed(4321)
held = [records(torch.arange(CLASSES)) for _ in range(10)]
with torch.no_grad():
    test = sum(F.cross_entropy(model.module(x), y) for x, y in held) / len(held)
if rank == 0:
    print(f"held out, all classes: final loss {test.item():.4f}")
dist.destroy_process_group()
