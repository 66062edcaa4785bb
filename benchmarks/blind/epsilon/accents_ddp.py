"""Words spoken by four groups of speakers; every rank reads its share of the recordings, gradients are averaged by
hand.

Run: torchrun --nproc_per_node 2 accents_ddp.py good
"""
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from models import Report

BAD = sys.argv[1] == "bad"


def shard(files):
    """The recordings of this process."""
    rank = int(os.environ.get("SLURM_PROCID" if BAD else "RANK", 0))
    return files[rank::dist.get_world_size()]


class Words(nn.Module):
    def __init__(self, dim=96):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv1d(16, 64, 5, padding=2), nn.ReLU(), nn.Conv1d(64, dim, 5, stride=2), nn.ReLU())
        self.head = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 10))

    def forward(self, x):
        return self.head(self.conv(x).amax(-1))


dist.init_process_group("gloo")
torch.manual_seed(0)
words, accents = torch.randn(10, 16, 24), 2.5 * torch.randn(4, 16, 24)
bend = torch.stack([torch.linalg.qr(torch.randn(16, 16))[0] for _ in range(4)])


def record(word, group):
    return bend[group] @ words[word] + accents[group] + 0.8 * torch.randn(len(word), 16, 24)


files = [(i, g) for i in range(40) for g in range(4)]
mine = shard(files)
model = Words()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
report = Report(quiet=dist.get_rank() > 0)
torch.manual_seed(1 + dist.get_rank())
for step in range(120):
    at = torch.randint(0, len(mine), (64,)).tolist()
    word, group = torch.randint(0, 10, (64,)), torch.tensor([mine[a][1] for a in at])
    loss = F.cross_entropy(model(record(word, group)), word)
    optimizer.zero_grad()
    loss.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
    optimizer.step()
    report.add(loss.detach())
with torch.no_grad():
    word, group = torch.randint(0, 10, (600,)), torch.randint(0, 4, (600,))
    test = F.cross_entropy(model(record(word, group)), word)
report.end(test_loss=test)
dist.destroy_process_group()
