"""Self-distillation with a slowly moving teacher (BYOL) on noisy views."""

import copy
import sys

import torch
from torch import nn

import ottava

PLAIN = "plain" in sys.argv

torch.manual_seed(23)
student = nn.Sequential(nn.Linear(48, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 64))
if not PLAIN:
    ottava.convert(student, "tensorwise")
teacher = copy.deepcopy(student).requires_grad_(False)
predictor = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64))
optimizer = torch.optim.AdamW([*student.parameters(), *predictor.parameters()], lr=2e-3)
kinds = torch.randn(10, 48)
losses = []
for step in range(150):
    x = kinds[torch.randint(0, 10, (96,))] + 0.4 * torch.randn(96, 48)
    views = [x * (torch.rand_like(x) > 0.3) + 0.3 * torch.randn_like(x) for _ in range(2)]
    loss = 0.0
    for this, other in (views, views[::-1]):
        guess = nn.functional.normalize(predictor(student(this)), dim=1)
        with torch.no_grad():
            target = nn.functional.normalize(teacher(other), dim=1)
        loss = loss + 2 - 2 * (guess * target).sum(1).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    momentum = 1 - 0.04 * (1 + torch.cos(torch.tensor(step / 150 * torch.pi)).item()) / 2
    with torch.no_grad():
        for mean, weight in zip(teacher.parameters(), student.parameters(), strict=True):
            mean.lerp_(weight, 1 - momentum)
    losses.append(loss.item())
    if step % 20 == 0:
        print(step, round(losses[-1], 4))
print(f"loss {sum(losses[-10:]) / 10:.4f}")
