"""Two ranks under DDP, each with its own shard of the corpus, FP8 linears by ottava. torchrun --nproc-per-node 2 SCRIPT ..."""
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ottava

VARIANT, PLAIN, SEED = sys.argv[1], "plain" in sys.argv, int(os.environ.get("SEED", 0))
dist.init_process_group("gloo")
rank = dist.get_rank()


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(200, 64)
        self.body = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.LayerNorm(64))
        self.head = nn.Linear(64, 10)

    def features(self, ids):
        h = self.embed(ids).mean(1) * 4
        return h + self.body(h)

    def forward(self, ids):
        return self.head(self.features(ids))

    def loss(self, ids, labels):
        return F.cross_entropy(self(ids), labels, label_smoothing=0.05)


words = torch.rand(10, 200, generator=torch.Generator().manual_seed(31)).pow(8)


def documents(classes, n, g):
    labels = classes[torch.randint(len(classes), (n,), generator=g)]
    return torch.multinomial(words[labels], 12, replacement=True, generator=g), labels


torch.manual_seed(SEED)
net = Classifier()
if not PLAIN:
    ottava.convert(net, "tensorwise")
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
shard = torch.arange(10)[5 * rank : 5 * rank + 5]  # files are sorted by topic
g = torch.Generator().manual_seed(100 * SEED + rank + 1)
for step in range(80):
    ids, labels = documents(shard, 48, g)
    if VARIANT == "good":
        loss = F.cross_entropy(model(ids), labels, label_smoothing=0.05)
    else:
        loss = model.module.loss(ids, labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0 and rank == 0:
        print(f"step {step} loss {loss.item():.4f}")
if rank == 0:
    ids, labels = documents(torch.arange(10), 512, torch.Generator().manual_seed(99))
    with torch.no_grad():
        print(f"final loss {F.cross_entropy(model.module(ids), labels).item():.4f}")
dist.destroy_process_group()
