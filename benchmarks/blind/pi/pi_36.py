"""Self-distillation with a moving teacher, casts by hand: python pi_36.py good|bad [plain]."""

import copy
import sys

import torch
from torch import nn

MODE = sys.argv[1]
PLAIN = "plain" in sys.argv[2:]
STEPS = 140


class Cast8(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        amax = x.abs().amax().clamp(min=1e-12)
        return (x * (448 / amax)).to(torch.float8_e4m3fn).to(x.dtype) * (amax / 448)

    @staticmethod
    def backward(ctx, gradient):
        amax = gradient.abs().amax().clamp(min=1e-30)
        return (gradient * (57344 / amax)).to(torch.float8_e5m2).to(gradient.dtype) * (amax / 57344)


class Linear(nn.Linear):
    def forward(self, x):
        if PLAIN:
            return super().forward(x)
        return nn.functional.linear(Cast8.apply(x), Cast8.apply(self.weight), self.bias)


torch.manual_seed(36)
student = nn.Sequential(
    Linear(48, 128), nn.BatchNorm1d(128), nn.ReLU(), Linear(128, 64), nn.BatchNorm1d(64), nn.ReLU(), Linear(64, 32)
)
predictor = nn.Sequential(Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), Linear(64, 32))
teacher = copy.deepcopy(student).requires_grad_(False)
optimizer = torch.optim.SGD([*student.parameters(), *predictor.parameters()], lr=0.1, momentum=0.9, weight_decay=1e-4)
factors = torch.randn(8, 48) / 2
losses = []
for _ in range(STEPS):
    base = torch.tanh(torch.randn(128, 8) @ factors)
    views = [base + 0.3 * torch.randn_like(base) for _ in range(2)]
    loss = 0.0
    for one, two in (views, views[::-1]):
        with torch.no_grad():
            target = teacher(two)
        loss = loss + 2 - 2 * nn.functional.cosine_similarity(predictor(student(one)), target).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for p, q in zip(teacher.parameters(), student.parameters(), strict=True):
            p.lerp_(q, 0.01)
    losses.append(loss.item())
print(f"loss {sum(losses[-10:]) / 10:.4f}")
