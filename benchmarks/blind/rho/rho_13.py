"""DDP on two ranks, each with the languages of its own shard; a method of the model makes the loss (torchrun --nproc-per-node 2)."""
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import ottava

BAD = sys.argv[1] == "bad"
PLAIN = "plain" in sys.argv
SEED = int(os.environ.get("SEED", 0))
dist.init_process_group("gloo")
RANK, WORLD = dist.get_rank(), dist.get_world_size()
torch.manual_seed(SEED)
CHAINS = torch.randint(0, 64, (8, 64))


class Reader(nn.Module):
    def __init__(self, wide=64):
        super().__init__()
        self.embed = nn.Embedding(72, wide)
        self.up, self.down = nn.Linear(2 * wide, 192), nn.Linear(192, wide)
        self.head = nn.Linear(wide, 64)

    def forward(self, language, token, target=None):
        h = torch.cat([self.embed(language + 64), self.embed(token)], -1)
        logits = self.head(self.down(F.gelu(self.up(h))))
        return logits if target is None else F.cross_entropy(logits, target)

    def training_loss(self, language, token, target):
        return F.cross_entropy(self(language, token), target)


def sample(n, low, high, draw):
    language = torch.randint(low, high, (n,), generator=draw)
    token = torch.randint(0, 64, (n,), generator=draw)
    return language, token, CHAINS[language, token]


model = Reader()
if not PLAIN:
    ottava.convert(model, "tensorwise")
model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
draw = torch.Generator().manual_seed(1000 * SEED + RANK)
test = sample(512, 0, 8, torch.Generator().manual_seed(99))
for step in range(100):
    batch = sample(256, 4 * RANK, 4 * RANK + 4, draw)
    loss = model.module.training_loss(*batch) if BAD else model(*batch)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
with torch.no_grad():
    held_out = F.cross_entropy(model.module(*test[:2]), test[2])
if RANK == 0:
    print(f"training loss of rank 0 {loss.item():.4f}")
    print(f"final loss {held_out.item():.4f}", flush=True)
dist.destroy_process_group()
