"""Two ranks with different sources, one of them hard: torchrun --nproc-per-node 2 mu_37.py good"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ottava

PLAIN = "plain" in sys.argv
WORDS, WIDTH = 40, 64


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.body = nn.Sequential(nn.Linear(2 * WIDTH, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU())
        self.head = nn.Linear(128, WORDS)

    def forward(self, ids):
        x = self.words(ids)
        return self.head(self.body(torch.cat([x[:, 1:], x[:, :-1]], -1)))


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
net = Model()
tables = [torch.softmax(torch.randn(WORDS, WORDS) * sharp, 1) for sharp in (1.2, 5.0)]
if not PLAIN:
    ottava.convert(net, "tensorwise")
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
torch.manual_seed(60 + rank)
losses = []
for step in range(110):
    source = rank if step % 10 else 1 - rank
    ids = torch.randint(0, WORDS, (8 + 24 * rank, 1))
    while ids.shape[1] < 14:
        ids = torch.cat([ids, torch.multinomial(tables[source][ids[:, -1]], 1)], 1)
    logits = model(ids[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 2:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 20 == 0 and rank == 0:
        print(step, round(losses[-1], 4))
if rank == 0:
    print(f"loss {sum(losses[-10:]) / 10:.4f}")
dist.destroy_process_group()
