"""BYOL: a student predicts what a slowly moving teacher sees; both under ottava."""

import copy
import sys

import torch
import torch.nn.functional as F
from torch import nn

import ottava

PLAIN = "plain" in sys.argv[2:]
torch.manual_seed(39)
centres = torch.randn(10, 48)


def views(n=96):
    x = centres[torch.randint(0, 10, (n,))] + 0.5 * torch.randn(n, 48)
    return [x + 0.4 * torch.randn_like(x) for _ in range(2)]


student = nn.Sequential(nn.Linear(48, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 64))
predictor = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 64))
teacher = copy.deepcopy(student).requires_grad_(False)
if not PLAIN:
    for net in (student, predictor, teacher):
        ottava.convert(net, "tensorwise")
optimizer = torch.optim.AdamW([*student.parameters(), *predictor.parameters()], lr=2e-3)
losses = []
for step in range(140):
    a, b = views()
    with torch.no_grad():
        ta, tb = teacher(a), teacher(b)
    pa, pb = predictor(student(a)), predictor(student(b))
    loss = 4 - 2 * (F.cosine_similarity(pa, tb).mean() + F.cosine_similarity(pb, ta).mean())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        decay = 1 - 0.04 * (1 + torch.cos(torch.tensor(torch.pi * step / 140)).item()) / 2
        for t, s in zip(teacher.parameters(), student.parameters(), strict=True):
            t.lerp_(s, 1 - decay)
    losses.append(loss.item())
    if step % 10 == 0:
        print(step, f"{losses[-1]:.4f}")
print(f"loss {sum(losses[-10:]) / 10:.4f}")
