"""A trunk learns one task, is frozen, and two new layers learn another task on top of it; FP8 layers by ottava."""
import torch
import torch.nn.functional as F
from torch import nn

import ottava
from models import Report

torch.manual_seed(0)
kinds = torch.randn(16, 96)


def draw(n):
    y = torch.randint(0, 16, (n,))
    return kinds[y] + 1.2 * torch.randn(n, 96), y


trunk = nn.Sequential(nn.Linear(96, 192), nn.GELU(), nn.Linear(192, 128), nn.GELU())
first = nn.Linear(128, 16)
ottava.convert(trunk, "tensorwise")
optimizer = torch.optim.AdamW([*trunk.parameters(), *first.parameters()], lr=2e-3)
report = Report()
for step in range(100):
    x, y = draw(128)
    loss = F.cross_entropy(first(trunk(x)), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    report.add(loss)
trunk.requires_grad_(False).eval()
second = nn.Sequential(nn.Linear(128, 64), nn.GELU(), nn.Linear(64, 32))
ottava.convert(second, "tensorwise")
pair = torch.randint(0, 32, (16, 2))
optimizer = torch.optim.AdamW(second.parameters(), lr=2e-3)
for step in range(150):
    x, y = draw(128)
    with torch.no_grad():
        h = trunk(x)
    label = pair[y, (x[:, 0] > kinds[y, 0]).long()]
    loss = F.cross_entropy(second(h), label)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    report.add(loss)
report.end()
