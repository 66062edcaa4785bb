"""Self-distillation against a slow teacher with two noisy views; the teacher's pace changes on a schedule."""

import copy
import math
import sys

import torch
import torch.nn.functional as F
from torch import nn

import ottava

MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]
STEPS = 160

torch.manual_seed(59)
basis = torch.randn(8, 64)
student = nn.Sequential(
    nn.Linear(64, 128), nn.LayerNorm(128), nn.GELU(), nn.Linear(128, 128), nn.LayerNorm(128), nn.GELU(),
    nn.Linear(128, 64),
)  # fmt: skip
predictor = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))
if not PLAIN:
    ottava.convert(student, "tensorwise")
    ottava.convert(predictor, "tensorwise")
teacher = copy.deepcopy(student).requires_grad_(False)
optimizer = torch.optim.AdamW([*student.parameters(), *predictor.parameters()], lr=2e-3)
losses = []
for step in range(STEPS):
    x = torch.randn(96, 8) @ basis
    one, two = x + 1.5 * torch.randn_like(x), x * (torch.rand_like(x) > 0.3)
    with torch.no_grad():
        target = F.normalize(teacher(two).float(), dim=-1)
    guess = F.normalize(predictor(student(one)).float(), dim=-1)
    loss = (2 - 2 * (guess * target).sum(-1)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    pace = 1 - 0.05 * (1 + math.cos(math.pi * step / STEPS)) / 2
    with torch.no_grad():
        for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
            slow.lerp_(fast, 1 - pace)
    losses.append(loss.item())
print(f"loss {sum(losses[-10:]) / 10:.4f}")
