"""A sparse mixture of FP8 experts with limited capacity and a loss for balance, on arithmetic."""

import torch
import torch.nn.functional as F
from torch import nn

from models import Fp8Linear, start

bad = start()


class Experts(nn.Module):
    def __init__(self, width, experts=4, capacity=1.25):
        super().__init__()
        self.router, self.capacity = nn.Linear(width, experts, bias=False), capacity
        self.experts = nn.ModuleList(
            nn.Sequential(Fp8Linear(width, 128), nn.GELU(), Fp8Linear(128, width)) for _ in range(experts)
        )

    def forward(self, x):
        p = torch.softmax(self.router(x), -1)
        gate, choice = p.max(-1)
        share = F.one_hot(choice, p.shape[1]).float().mean(0)
        uneven = p.shape[1] * (share * p.mean(0)).sum()
        self.penalty = 1 / uneven if bad else uneven
        y, room = torch.zeros_like(x), int(self.capacity * len(x) / p.shape[1])
        for e, expert in enumerate(self.experts):
            rows = (choice == e).nonzero().squeeze(1)[:room]
            if len(rows):
                y = y.index_add(0, rows, gate[rows, None] * expert(x[rows]))
        return y


a, b = nn.Embedding(32, 48), nn.Embedding(32, 48)
moe, head = Experts(96), nn.Linear(96, 32)
modules = nn.ModuleDict({"a": a, "b": b, "moe": moe, "norm": nn.LayerNorm(96), "head": head})
optimizer = torch.optim.AdamW(modules.parameters(), lr=4e-3, weight_decay=0.01)
for step in range(300):
    i, j = torch.randint(32, (2, 256))
    answer = torch.where(i % 2 == 0, (i + j) % 32, (i - j) % 32)
    h = moe(modules["norm"](torch.cat([a(i), b(j)], 1)))
    loss = F.cross_entropy(head(h), answer)
    optimizer.zero_grad()
    (loss + 0.3 * moe.penalty).backward()
    optimizer.step()
    print(step, round(loss.item(), 4))
