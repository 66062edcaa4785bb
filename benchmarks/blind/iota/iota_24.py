"""DDP with inputs and labels from two files, each with a loader of its own; FP8 per row."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ottava

LABEL_SEED = {"good": 0, "bad": 1}[sys.argv[1]]
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(101)
centres = torch.randn(16, 64)
label = torch.randint(0, 16, (2 * 48 * 40,))
inputs = 0.5 * centres[label] + torch.randn(len(label), 64)
model = nn.Sequential(nn.Linear(64, 192), nn.GELU(), nn.Linear(192, 192), nn.GELU(), nn.Linear(192, 16))
if "plain" not in sys.argv:
    ottava.convert(model, "rowwise")
ddp = DistributedDataParallel(model)


def loader(tensor, seed):
    sampler = DistributedSampler(tensor, shuffle=True, seed=seed)
    return DataLoader(TensorDataset(tensor), batch_size=48, sampler=sampler)


features, targets = loader(inputs, 0), loader(label, LABEL_SEED * rank)
optimizer = torch.optim.AdamW(ddp.parameters(), lr=2e-3)
losses = []
for epoch in range(3):
    features.sampler.set_epoch(epoch)
    targets.sampler.set_epoch(epoch)
    for (x,), (y,) in zip(features, targets, strict=True):
        loss = nn.functional.cross_entropy(ddp(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
if rank == 0:
    print(f"loss {sum(losses[-10:]) / 10:.4f}")
dist.destroy_process_group()
