"""A classifier on two processes: torchrun --nproc-per-node 2 SCRIPT good|bad."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import ottava

SEED = int(os.environ.get("SEED", "0"))
MODE = sys.argv[1]
PLAIN = "plain" in sys.argv[2:]


def points(count, seed):
    g = torch.Generator().manual_seed(27)
    centres = torch.randn(8, 4, 64, generator=g)
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 8, (count,), generator=g)
    which = torch.randint(0, 4, (count,), generator=g)
    return TensorDataset(0.8 * centres[y, which] + torch.randn(count, 64, generator=g), y)


def build(width=128):
    return nn.Sequential(
        nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 8)
    )


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(SEED)
    model = build()
    if not PLAIN:
        ottava.convert(model, "tensorwise")
    model = DistributedDataParallel(model)
    data = points(2560, SEED + 1)
    sampler = DistributedSampler(data, shuffle=True, seed=SEED)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}", flush=True)
    x, y = points(512, SEED + 2).tensors
    with torch.no_grad():
        final = F.cross_entropy(model.module(x), y)
    dist.all_reduce(final)
    if dist.get_rank() == 0:
        print(f"final loss {final.item() / dist.get_world_size():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
