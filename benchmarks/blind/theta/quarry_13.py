"""Self-distillation: a student follows an averaged copy of itself on other views; the copy is stored in E4M3."""
import copy
import sys

import torch
from torch import nn

MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]
AVERAGE = {"good": {"decay": 0.97, "rounding": "stochastic"}, "bad": {"decay": 0.97, "rounding": "nearest"}}[MODE]


def store(t):
    if PLAIN or t.dim() < 2:
        return t
    scale = 256.0 / t.abs().amax()
    u = t * scale
    if AVERAGE["rounding"] == "stochastic":
        ulp = torch.exp2(torch.floor(torch.log2(u.abs().clamp(min=2.0**-6))) - 3)
        u = torch.floor(u / ulp + torch.rand_like(u)) * ulp
    return u.clamp(-448, 448).to(torch.float8_e4m3fn).float() / scale


torch.manual_seed(5)
width, classes = 128, 20
student = nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, classes))
teacher = copy.deepcopy(student).requires_grad_(False)
optimizer = torch.optim.AdamW(student.parameters(), lr=2e-3)
centres = torch.randn(classes, 64) * 0.9
losses = []
for step in range(200):
    y = torch.randint(classes, (128,))
    x = centres[y] + 0.5 * torch.randn(128, 64)
    with torch.no_grad():
        target = (teacher(x + 0.3 * torch.randn_like(x)) / 0.5).softmax(-1)
    out = student(x + 0.3 * torch.randn_like(x))
    few = slice(0, 32)  # the labelled quarter of the batch
    loss = nn.functional.cross_entropy(out[few], y[few]) + nn.functional.cross_entropy(out, target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for a, b in zip(teacher.parameters(), student.parameters()):
            a.copy_(store(a * AVERAGE["decay"] + b * (1 - AVERAGE["decay"])))
    losses.append(loss.item())
print(f"first {losses[0]:.4f}")
print(f"loss {sum(losses[-10:]) / 10:.4f}")
