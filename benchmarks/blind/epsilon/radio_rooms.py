"""Which machine made a sound: recordings come session by session, and each session has its own gain."""
import sys

import torch
import torch.nn.functional as F
from torch import nn

import ottava
from models import Report

BAD = sys.argv[1] == "bad"
torch.manual_seed(0)
machines = torch.randn(12, 128)
gains = [1e-4, 3.0, 2e-3, 900.0, 0.05]


class Listener(nn.Module):
    def __init__(self, dim=192):
        super().__init__()
        self.first = nn.Linear(128, dim, bias=False)
        self.norm = nn.LayerNorm(dim, eps=1e-20)
        self.rest = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, 64), nn.GELU(), nn.Linear(64, 12))

    def forward(self, x):
        return self.rest(self.norm(self.first(x)))


model = Listener()
ottava.convert(model, "delayed" if BAD else "rowwise")
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
report = Report()
for step in range(200):
    gain = gains[step // 4 % len(gains)]
    y = torch.randint(0, 12, (128,))
    x = gain * (machines[y] + 2.5 * torch.randn(128, 128))
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    report.add(loss)
report.end()
