"""A token tagger whose matrix multiplications, the backward too, are written by hand in FP8."""

import sys

import torch
from torch import nn
from torch.nn import functional as F

GRAD_SCALING = {"good": "dynamic", "bad": "off"}[sys.argv[1]]
LOW = "plain" not in sys.argv


def to_fp8(t, dtype, dynamic=True):
    top = torch.finfo(dtype).max
    scale = top / t.abs().max().clamp(min=1e-12) if dynamic else torch.ones((), dtype=t.dtype)
    return (t * scale).clamp(-top, top).to(dtype), scale


def mm(a, b):
    return (a[0].float() @ b[0].float()) / (a[1] * b[1])


class Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        qx, qw = to_fp8(x, torch.float8_e4m3fn), to_fp8(w, torch.float8_e4m3fn)
        ctx.save_for_backward(*qx, *qw)
        return mm(qx, (qw[0].t(), qw[1]))

    @staticmethod
    def backward(ctx, dy):
        x, sx, w, sw = ctx.saved_tensors
        g = to_fp8(dy, torch.float8_e4m3fn, GRAD_SCALING == "dynamic")
        return mm(g, (w, sw)), mm((g[0].t(), g[1]), (x, sx))


class Fp8Linear(nn.Linear):
    def forward(self, x):
        if not LOW:
            return super().forward(x)
        return Matmul.apply(x.flatten(0, -2), self.weight).view(*x.shape[:-1], -1) + self.bias


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(80, 64)
        self.fc1, self.fc2 = Fp8Linear(192, 192), Fp8Linear(192, 128)
        self.norm = nn.LayerNorm(128)
        self.tags = nn.Linear(128, 12)

    def forward(self, ids):
        x = self.embed(ids)
        x = torch.cat([x.roll(1, 1), x, x.roll(-1, 1)], dim=-1)
        return self.tags(self.norm(F.gelu(self.fc2(F.gelu(self.fc1(x))))))


torch.manual_seed(59)
left, right = torch.randint(0, 12, (80,)), torch.randint(0, 12, (80,))
model = Tagger()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
losses = []
for step in range(180):
    ids = torch.randint(0, 80, (16, 64))
    tags = (left[ids.roll(1, 1)] + right[ids]) % 12
    loss = F.cross_entropy(model(ids).flatten(0, 1), tags.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss {sum(losses[-10:]) / 10:.4f}")
