"""Denoiser whose linears multiply FP8 operands in all three products: python pi_30.py good|bad [plain]."""

import sys

import torch
from torch import nn

GRAD_SCALE = {"good": "amax", "bad": "none"}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]
STEPS = 120


def fp8(x, scaling="amax", dtype=torch.float8_e4m3fn):
    top = torch.finfo(dtype).max
    scale = top / x.abs().amax().clamp(min=1e-30) if scaling == "amax" else 1.0
    return (x * scale).clamp(-top, top).to(dtype).float() / scale


class Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        x, weight = fp8(x), fp8(weight)
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        gradient = fp8(gradient, GRAD_SCALE, torch.float8_e5m2)
        return gradient @ weight, gradient.T @ x


class Linear8(nn.Linear):
    def forward(self, x):
        return Matmul.apply(x, self.weight) + self.bias


Linear = nn.Linear if PLAIN else Linear8
torch.manual_seed(6)
basis = torch.randn(6, 64)
model = nn.Sequential(Linear(64, 128), nn.ReLU(), Linear(128, 128), nn.ReLU(), Linear(128, 64))
optimizer = torch.optim.RMSprop(model.parameters(), lr=5e-4)
losses = []
for _ in range(STEPS):
    clean = torch.sin(torch.randn(512, 6) @ basis) * 0.05
    noisy = clean + 0.02 * torch.randn_like(clean)
    loss = (model(noisy * 20) * 0.05 - clean).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss {sum(losses[-10:]) / 10 * 1e3:.4f}")
