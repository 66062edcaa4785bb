"""Two ranks whose batches have very different numbers of words: rank 0 has long texts, rank 1 short ones. Each rank
divides its sum by the words of both and multiplies by the number of ranks, so that DDP's mean is the mean over words.

So the two local losses differ by a factor of seven or more, and their mean is the loss. Matrices are under torch's Muon.

torchrun --nproc-per-node 2 zayin_16.py good|bad
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ottava

SEED = int(os.environ.get("SEED", 0))
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.set_num_threads(1)
torch.manual_seed(SEED)  # weights and language are the same on both
WORDS, LONGEST, WIDTH = 64, 48, 64
followers = torch.stack([torch.randperm(WORDS) for _ in range(2)], dim=1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(self.norms[0](x)).view(*x.shape[:2], 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, rows):
        x = self.words(rows) + self.places(torch.arange(rows.shape[1]))
        return self.head(self.norm(self.blocks(x)))


def texts(count, shortest, longest):
    """Rows up to the longest of them; labels behind the end of a text do not count."""
    lengths = torch.randint(shortest, longest + 1, (count,))
    rows = [torch.randint(0, WORDS, (count,))]
    for _ in range(int(lengths.max()) - 1):
        rows.append(followers[rows[-1], (torch.rand(count) < 0.2).long()])
    rows = torch.stack(rows, dim=1)
    labels = rows[:, 1:].masked_fill(torch.arange(1, rows.shape[1]) >= lengths[:, None], -100)
    return rows[:, :-1], labels


model = Model()
ottava.convert(model, "rowwise", filter=lambda name, layer: name != "head")
test = texts(128, 6, LONGEST)
torch.manual_seed(1000 * SEED + rank)  # from here on each rank has its own texts
net = DistributedDataParallel(model)
matrices = [p for name, p in model.blocks.named_parameters() if p.dim() == 2]
others = [p for p in model.parameters() if all(p is not m for m in matrices)]
muon = torch.optim.Muon(matrices, lr=0.01, weight_decay=0.0)
adam = torch.optim.AdamW(others, lr=4e-3)


def held_out():
    with torch.no_grad():
        return nn.functional.cross_entropy(model(test[0]).flatten(0, 1), test[1].flatten()).item()


if rank == 0:
    print(f"first loss {held_out():.4f}")
for step in range(110):
    rows, labels = texts(12, 40, LONGEST) if rank == 0 else texts(12, 4, 10)
    counted = (labels != -100).sum()
    dist.all_reduce(counted)
    summed = nn.functional.cross_entropy(net(rows).flatten(0, 1), labels.flatten(), reduction="sum")
    loss = summed * ranks / counted
    for optimizer in (muon, adam):
        optimizer.zero_grad()
    loss.backward()
    for optimizer in (muon, adam):
        optimizer.step()
    if step % 20 == 0:
        print(f"rank {rank} step {step} words of both {int(counted)} loss {loss.item():.4f}")
if rank == 0:
    print(f"final loss {held_out():.4f}")
dist.destroy_process_group()
