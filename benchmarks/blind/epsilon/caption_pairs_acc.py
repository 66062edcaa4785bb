"""Pictures and captions are matched by a contrastive loss, with accelerate on two ranks; every rank holds its own
part of the subjects.

Run: torchrun --nproc_per_node 2 caption_pairs_acc.py good
"""
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn

from models import Report

BAD = sys.argv[1] == "bad"


class Matcher(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        self.picture = nn.Sequential(nn.Linear(96, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, dim))
        self.caption = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, dim))
        self.heat = nn.Parameter(torch.tensor(2.0))

    def match(self, p, c):
        p, c = F.normalize(self.picture(p), dim=-1), F.normalize(self.caption(c), dim=-1)
        return self.heat.exp() * p @ c.t()

    def forward(self, p, c):
        return self.match(p, c)


def pairs(n, subjects, generator=None):
    s = subjects[torch.randint(0, len(subjects), (n,), generator=generator)]
    detail = torch.randn(n, 8, generator=generator)
    seen, said = torch.cat([look[s], detail], 1), torch.cat([name[s], detail], 1)
    return (torch.tanh(seen @ to_picture) + 0.3 * torch.randn(n, 96, generator=generator),
            torch.tanh(said @ to_caption) + 0.3 * torch.randn(n, 64, generator=generator))


accelerator = Accelerator(cpu=True)
rank, world = accelerator.process_index, accelerator.num_processes
torch.manual_seed(0)
look, name = 2 * torch.randn(2, 20, 8)
to_picture, to_caption = torch.randn(16, 96) / 4, torch.randn(16, 64) / 4
model = Matcher()
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
score = accelerator.unwrap_model(model).match if BAD else model
mine = torch.arange(20).chunk(world)[rank]
own = torch.Generator().manual_seed(50 + rank)
report = Report(quiet=rank > 0)
target = torch.arange(64)
for step in range(150):
    logits = score(*pairs(64, mine, own))
    loss = (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target)) / 2
    optimizer.zero_grad()
    accelerator.backward(loss)
    optimizer.step()
    report.add(loss.detach())
with torch.no_grad():
    both = torch.Generator().manual_seed(7)
    test = torch.stack([F.cross_entropy(score(*pairs(64, torch.arange(20), both)), target) for _ in range(20)]).mean()
report.end(test_loss=test)
dist.destroy_process_group()
