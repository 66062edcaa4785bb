"""Data parallelism by hand: each rank has its part of the batch, and gradients are averaged."""

import argparse
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import ottava

PLAIN = "plain" in sys.argv
ARGUMENTS = {"good": ["--seed-per-rank", "data"], "bad": ["--seed-per-rank", "all"]}[sys.argv[1]]


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 128), nn.Linear(128, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--seed-per-rank", choices=["data", "all"], default="data")
    options = parser.parse_args(ARGUMENTS)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    truth = torch.randn(32, 32, generator=torch.Generator().manual_seed(9)) / 10
    torch.manual_seed(options.seed + (rank if options.seed_per_rank == "all" else 0))
    model = nn.Sequential(nn.Linear(32, 64), Block(64), Block(64), nn.Linear(64, 32))
    if not PLAIN:
        ottava.convert(model, "tensorwise")
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    torch.manual_seed(1000 + rank)
    losses = []
    for _ in range(150):
        x = torch.randn(96, 32)
        loss = F.mse_loss(model(x), torch.sin(x @ truth))
        optimizer.zero_grad()
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world
        optimizer.step()
        losses.append(loss.item())
    if rank == 0:
        print(f"loss {sum(losses[-10:]) / 10:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
