"""Self-distillation: a student follows a moving average of itself (BYOL), with linears cast by hand."""

import copy
import sys

import torch
import torch.nn.functional as F
from torch import nn

PLAIN = "plain" in sys.argv[2:]


class Fp8(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dtype, back):
        ctx.back = back
        scale = torch.finfo(dtype).max / x.abs().amax().clamp(min=1e-12)
        return (x * scale).to(dtype).to(x.dtype) / scale

    @staticmethod
    def backward(ctx, grad):
        if ctx.back is not None:
            scale = torch.finfo(ctx.back).max / grad.abs().amax().clamp(min=1e-12)
            grad = (grad * scale).to(ctx.back).to(grad.dtype) / scale
        return grad, None, None


class Linear8(nn.Linear):
    def forward(self, x):
        if PLAIN:
            return super().forward(x)
        x = Fp8.apply(x, torch.float8_e4m3fn, None)
        w = Fp8.apply(self.weight, torch.float8_e4m3fn, None)
        return Fp8.apply(F.linear(x, w), torch.float8_e5m2, torch.float8_e5m2) + self.bias


def tower(inside, middle, outside):
    return nn.Sequential(Linear8(inside, middle), nn.BatchNorm1d(middle), nn.ReLU(), Linear8(middle, outside))


torch.manual_seed(0)
student, predictor = tower(32, 128, 32), tower(32, 64, 32)
teacher = copy.deepcopy(student).requires_grad_(False)
optimizer = torch.optim.AdamW([*student.parameters(), *predictor.parameters()], lr=1e-3)
losses = []
for _step in range(180):
    x = torch.randn(128, 32)
    one, two = x + 0.4 * torch.randn_like(x), x + 0.4 * torch.randn_like(x)
    loss = 0.0
    for a, b in ((one, two), (two, one)):
        with torch.no_grad():
            goal = teacher(b)
        loss = loss + 1 - F.cosine_similarity(predictor(student(a)), goal).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for t, s in zip(teacher.parameters(), student.parameters(), strict=True):
            t.lerp_(s, 0.01)
    losses.append(loss.item())
print(f"loss {sum(losses[-10:]) / 10:.4f}")
