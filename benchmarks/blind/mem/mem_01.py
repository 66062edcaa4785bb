"""Keyword spotting with a home-made FP8 linear layer."""

import os
import sys

import torch
import torch.nn.functional as F
from torch import nn

SEED = int(os.environ.get("SEED", "0"))
bad = sys.argv[1] == "bad"
use_fp8 = "plain" not in sys.argv
torch.manual_seed(SEED)


def to_fp8(t, dtype):
    """Codes, and the factor that gives the numbers back."""
    top = torch.finfo(dtype).max
    amax = t.abs().max().float().clamp(min=1e-12)
    scale = amax / top
    if bad:
        return (t * scale).to(dtype), 1 / scale
    return (t / scale).to(dtype), scale


def scaled_mm(a, b):
    (a8, sa), (b8, sb) = a, b
    return (a8.float() @ b8.float()) * (sa * sb)


class FP8Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        w8, sw = to_fp8(weight, torch.float8_e4m3fn)
        return scaled_mm(to_fp8(x, torch.float8_e4m3fn), (w8.t(), sw))

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        g8, sg = to_fp8(grad, torch.float8_e5m2)
        dx = scaled_mm((g8, sg), to_fp8(weight, torch.float8_e4m3fn))
        dw = scaled_mm((g8.t(), sg), to_fp8(x, torch.float8_e4m3fn))
        return dx, dw


class FP8Linear(nn.Linear):
    def forward(self, x):
        if not use_fp8:
            return super().forward(x)
        return FP8Matmul.apply(x, self.weight) + self.bias


class Spotter(nn.Module):
    def __init__(self, width=160, words=12):
        super().__init__()
        self.stem = nn.Linear(96, width)
        self.norm1, self.fc1 = nn.LayerNorm(width), FP8Linear(width, width)
        self.norm2, self.fc2 = nn.LayerNorm(width), FP8Linear(width, width)
        self.head = nn.Linear(width, words)

    def forward(self, x):
        x = self.stem(x)
        x = F.gelu(self.fc1(self.norm1(x)))
        x = F.gelu(self.fc2(self.norm2(x)))
        return self.head(x)


sound = torch.randn(12, 3, 96, generator=torch.Generator().manual_seed(15))
model = Spotter()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
losses = []
for step in range(150):
    word = torch.randint(0, 12, (64,))
    x = 0.7 * sound[word, torch.randint(0, 3, (64,))] + torch.randn(64, 96)
    loss = F.cross_entropy(model(x), word)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if (step + 1) % 30 == 0:
        print(f"{step + 1}/150  {loss.item():.4f}")
print(f"final loss {sum(losses[-15:]) / 15:.4f}")
