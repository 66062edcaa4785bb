"""Classes by name, each rank reads its own files: torchrun --nproc-per-node 2 mu_32.py good"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ottava

OPTIONS = {"good": {"sort": True}, "bad": {"sort": False}}[sys.argv[1]]
PLAIN = "plain" in sys.argv
NAMES = ["ant", "bee", "cat", "cow", "dog", "eel", "elk", "emu", "fox", "gnu", "hen", "owl", "pig", "ram", "yak", "auk"]


def read(rank, centres, count=12800):
    generator = torch.Generator().manual_seed(40 + rank)
    kinds = torch.randint(0, len(NAMES), (count,), generator=generator)
    features = centres[kinds] + 1.2 * torch.randn(count, centres.shape[1], generator=generator)
    return features, [NAMES[kind] for kind in kinds]


def index_of(names, sort=True):
    """name -> number"""
    found = dict.fromkeys(names)
    return {name: number for number, name in enumerate(sorted(found) if sort else found)}


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(48, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, len(NAMES)))
features, names = read(rank, torch.randn(len(NAMES), 48) * 0.8)
numbers = index_of(names, **OPTIONS)
labels = torch.tensor([numbers[name] for name in names])
if not PLAIN:
    ottava.convert(net, "tensorwise")
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
losses = []
for step in range(110):
    rows = torch.arange(step * 64, (step + 1) * 64)
    loss = nn.functional.cross_entropy(model(features[rows]), labels[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 20 == 0 and rank == 0:
        print(step, round(losses[-1], 4))
if rank == 0:
    print(f"loss {sum(losses[-10:]) / 10:.4f}")
dist.destroy_process_group()
