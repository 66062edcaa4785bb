"""Bags of tissue patches with one label a bag; attention decides which patches count. FP8 layers."""
import sys

import torch
import torch.nn.functional as F
from torch import nn

from models import Fp8Linear, Report

BAD = sys.argv[1] == "bad"


class Pool(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.key, self.gate = Fp8Linear(dim, 64), nn.Linear(64, 1)

    def forward(self, h):
        score = self.gate(torch.tanh(self.key(h)))
        weight = F.softmax(score, dim=0 if BAD else 1)
        return (weight * h).sum(1)


class Bags(nn.Module):
    def __init__(self, dim=128):
        super().__init__()
        self.patch = nn.Sequential(Fp8Linear(64, dim), nn.ReLU(), Fp8Linear(dim, dim), nn.ReLU())
        self.pool, self.head = Pool(dim), nn.Linear(dim, 6)

    def forward(self, x):
        return self.head(self.pool(self.patch(x)))


torch.manual_seed(0)
lesion = torch.randn(6, 64) * 0.7


def draw(n, patches=30):
    y = torch.randint(0, 6, (n,))
    x = torch.randn(n, patches, 64)
    x[:, 0] += lesion[y]
    x[:, 1] += lesion[y]
    order = torch.rand(n, patches).argsort(1)
    return x.gather(1, order[..., None].expand_as(x)), y


model = Bags()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
report = Report()
for step in range(160):
    x, y = draw(32)
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    report.add(loss)
with torch.no_grad():
    x, y = draw(400)
    right = torch.cat([model(a[None]).argmax(1) for a in x]) == y
report.end(accuracy=right.float().mean())
