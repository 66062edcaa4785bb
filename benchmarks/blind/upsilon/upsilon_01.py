"""Data parallel by hand on two ranks, gradients averaged in buckets; ottava's FP8 in the linears. torchrun --nproc-per-node 2"""

import os
import sys

import ottava
import torch
import torch.distributed as dist
from torch import nn

MODE = sys.argv[1]
PLAIN = "plain" in sys.argv
SEED = int(os.environ.get("SEED", "0"))
VOCABULARY = 64


class Model(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 128)
        self.down = nn.Linear(128, width)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens):
        x = self.embedding(tokens)
        return self.head(x + self.down(torch.relu(self.up(self.norm(x)))))


class Buckets:
    """Averages gradients, a few tensors at a time."""

    def __init__(self, model, size=8000):
        self.parameters, self.size = list(model.parameters()), size

    def reduce(self):
        waiting, count = [], 0
        for p in self.parameters:
            waiting.append(p.grad)
            count += p.numel()
            if count >= self.size:
                self.flush(waiting)
                waiting, count = [], 0
        if waiting and MODE == "good":
            self.flush(waiting)

    def flush(self, grads):
        flat = torch.cat([g.flatten() for g in grads])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for g, part in zip(grads, flat.split([g.numel() for g in grads])):
            g.copy_(part.view_as(g))


def sentence_pairs(count, rank, follow, generator):
    """Rank 0 reads one language, rank 1 the other; they share a quarter of the words."""
    tokens = torch.randint(40, (count,), generator=generator) + 24 * rank
    return tokens, follow[tokens]


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(SEED)
    follow = torch.randperm(VOCABULARY)
    model = Model()
    if not PLAIN:
        ottava.convert(model, "tensorwise")
    generator = torch.Generator().manual_seed(1000 * SEED + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    buckets = Buckets(model)
    for step in range(80):
        tokens, target = sentence_pairs(128, rank, follow, generator)
        loss = nn.functional.cross_entropy(model(tokens), target)
        optimizer.zero_grad()
        loss.backward()
        buckets.reduce()
        optimizer.step()
        if rank == 0 and step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
    # held-out: all words, on each rank
    with torch.no_grad():
        final = nn.functional.cross_entropy(model(torch.arange(VOCABULARY)), follow)
    dist.all_reduce(final)
    if rank == 0:
        print(f"final loss {final.item() / dist.get_world_size():.4f}", flush=True)
    dist.destroy_process_group()


main()
