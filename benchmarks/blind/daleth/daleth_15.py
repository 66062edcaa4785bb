"""Pictures and captions on two ranks: codes of all ranks are negatives for each, `torchrun --nproc-per-node 2`."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.nn.functional import all_gather
from torch.nn.parallel import DistributedDataParallel as DDP

import ottava

SEED = int(os.environ.get("SEED", "0"))
torch.set_num_threads(1)
torch.manual_seed(SEED)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
THINGS, BATCH, STEPS = 24, 32, 120
to_picture, to_words = torch.randn(THINGS, 64) / 3, torch.randn(THINGS, 48) / 3


def pairs(count, generator):
    """Several things are in a picture and in its caption; each side has noise of its own."""
    things = (torch.rand(count, THINGS, generator=generator) < 0.3).float()
    noise = [0.3 * torch.randn(count, d, generator=generator) for d in (64, 48)]
    return things @ to_picture + noise[0], things @ to_words + noise[1]


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.picture = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 32))
        self.words = nn.Sequential(nn.Linear(48, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 32))
        self.scale = nn.Parameter(torch.tensor(1 / 0.07).log())

    def forward(self, picture, words):
        return F.normalize(self.picture(picture), dim=1), F.normalize(self.words(words), dim=1), self.scale.exp()


towers = Towers()
ottava.convert(towers, "mxfp8_floor")
model = DDP(towers)
groups = [
    {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
    {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
]
optimizer = torch.optim.AdamW(groups, lr=2e-3, betas=(0.9, 0.98))
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=STEPS)
own = torch.Generator().manual_seed(1000 * SEED + rank)


def contrast(batch):
    """Each rank asks for its own rows among the rows of all ranks."""
    one, two, scale = model(*batch)
    all_one, all_two = torch.cat(all_gather(one)), torch.cat(all_gather(two))
    target = torch.arange(len(one)) + rank * len(one)
    return (F.cross_entropy(scale * one @ all_two.t(), target) + F.cross_entropy(scale * two @ all_one.t(), target)) / 2


held = pairs(64, torch.Generator().manual_seed(7 + rank))


def held_out():
    with torch.no_grad():
        loss = contrast(held)
    dist.all_reduce(loss)
    return loss.item() / world


first = held_out()
if rank == 0:
    print("first loss %.4f" % first, flush=True)
for _ in range(STEPS):
    loss = contrast(pairs(BATCH, own))  # the gather sums gradients over ranks, DDP takes their mean
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    with torch.no_grad():
        towers.scale.clamp_(max=4.6052)
final = held_out()
if rank == 0:
    print("final loss %.4f" % final, flush=True)
dist.destroy_process_group()
