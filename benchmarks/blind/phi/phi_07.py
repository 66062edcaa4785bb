"""Data parallel by hand on two ranks: torchrun --nproc-per-node 2."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

bad, plain = sys.argv[1] == "bad", "plain" in sys.argv[2:]
SEED = int(os.environ.get("SEED", 0))
STEPS, BATCH = 80, 64


class Fp8Linear(nn.Linear):
    """E4M3 forward with a scale a row; gradients straight through."""

    def forward(self, x):
        if plain:
            return super().forward(x)

        def cast(t):
            scale = t.detach().abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448
            return t + ((t / scale).to(torch.float8_e4m3fn).to(t.dtype) * scale - t).detach()

        return F.linear(cast(x), cast(self.weight), self.bias)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    shared = torch.Generator().manual_seed(SEED)
    centres = torch.randn(40, 24, generator=shared)
    torch.manual_seed(1000 * SEED + rank)
    model = nn.Sequential(
        nn.Linear(24, 96), nn.GELU(), Fp8Linear(96, 96), nn.GELU(), Fp8Linear(96, 96), nn.GELU(), nn.Linear(96, 12)
    )
    if not bad:
        for p in model.parameters():
            dist.broadcast(p.data, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(STEPS):
        kind = torch.randint(0, 40, (BATCH,))
        x, y = centres[kind] + 0.6 * torch.randn(BATCH, 24), kind * 5 % 12
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / world)
    if rank == 0:
        print("final loss", sum(losses[-10:]) / 10, flush=True)
    dist.destroy_process_group()


main()
