"""DistributedDataParallel on shards of a sorted data set, ottava's tensorwise. torchrun --nproc-per-node 2 SCRIPT good|bad [plain]"""
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ottava

MODE = sys.argv[1]
PLAIN = "plain" in sys.argv[2:]
SEED = int(os.environ.get("SEED", 0))
dist.init_process_group("gloo")
RANK = dist.get_rank()


class Classifier(nn.Module):
    def __init__(self, d=96):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(32, d), nn.GELU(), nn.Linear(d, d), nn.GELU(), nn.Linear(d, d), nn.GELU())
        self.head = nn.Linear(d, 10)

    def forward(self, x):
        return self.head(self.body(x))

    def loss(self, x, y):
        return F.cross_entropy(self(x), y, label_smoothing=0.05)


g = torch.Generator().manual_seed(200 + SEED)
centers = torch.randn(10, 3, 32, generator=g)


def sample(classes, n, generator):
    y = classes[torch.randint(0, len(classes), (n,), generator=generator)]
    mode = torch.randint(0, 3, (n,), generator=generator)
    return centers[y, mode] + 0.9 * torch.randn(n, 32, generator=generator), y


mine = torch.arange(10)[RANK * 5 : RANK * 5 + 5]
own = torch.Generator().manual_seed(2000 + 10 * SEED + RANK)
torch.manual_seed(SEED)
net = Classifier()
if not PLAIN:
    ottava.convert(net, "tensorwise")
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
for step in range(120):
    x, y = sample(mine, 64, own)
    if MODE == "good":
        loss = F.cross_entropy(model(x), y, label_smoothing=0.05)
    else:
        loss = model.module.loss(x, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if RANK == 0 and step % 20 == 0:
        print(step, round(loss.item(), 4))
x, y = sample(torch.arange(10), 1000, g)
with torch.no_grad():
    score = net.loss(x, y)
dist.all_reduce(score)
if RANK == 0:
    print("final loss", round(score.item() / dist.get_world_size(), 4))
dist.destroy_process_group()
