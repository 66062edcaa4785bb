"""Gradients averaged by hooks on two ranks, with ottava's FP8 layers. torchrun --nproc_per_node=2 SCRIPT good|bad [plain]"""
import sys

import torch
import torch.distributed as dist
from torch import nn

import ottava

MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]
SEED = {"good": lambda rank: 12, "bad": lambda rank: 12 + rank}[MODE]

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(SEED(rank))
width, vocab = 128, 64


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


model = nn.Sequential(nn.Embedding(vocab, width // 2), nn.Flatten(1), Block(), Block(), nn.LayerNorm(width), nn.Linear(width, vocab))
if not PLAIN:
    ottava.convert(model, "blockwise", filter=lambda name, layer: name.endswith(("up", "down")))


def average(p):
    dist.all_reduce(p.grad)
    p.grad /= world


for p in model.parameters():
    p.register_post_accumulate_grad_hook(average)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
table = torch.randint(vocab, (vocab, vocab), generator=torch.Generator().manual_seed(13))
mine = torch.Generator().manual_seed(20 + rank)
losses = []
for step in range(150):
    ids = torch.randint(vocab, (128, 2), generator=mine)
    noise = torch.randint(vocab, (128,), generator=mine)
    labels = torch.where(torch.rand(128, generator=mine) < 0.85, table[ids[:, 0] // 4, ids[:, 1] // 4], noise)
    loss = nn.functional.cross_entropy(model(ids), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
if rank == 0:
    print(f"first {losses[0]:.4f}")
    print(f"loss {sum(losses[-10:]) / 10:.4f}")
dist.destroy_process_group()
