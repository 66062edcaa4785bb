"""Sets of 1,400 points are pooled by attention; the product of probabilities and values is taken in E4M3."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

import ottava

P_SCALE = {"good": 256.0, "bad": 1.0}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]


class Cast(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        return (x * scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) / scale

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Pool(nn.Module):
    def __init__(self, width, heads=4):
        super().__init__()
        self.heads = heads
        self.query = nn.Parameter(torch.randn(heads, width // heads) * 0.1)
        self.kv = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        b, t, d = x.shape
        k, v = self.kv(x).view(b, t, 2, self.heads, d // self.heads).unbind(2)
        p = torch.einsum("hd,bthd->bht", self.query, k).div((d // self.heads) ** 0.5).softmax(-1)
        if not PLAIN:
            p = Cast.apply(p, P_SCALE)
            v = Cast.apply(v, 448 / v.detach().abs().amax())
        pooled = torch.einsum("bht,bthd->bhd", p, v).reshape(b, d)
        return self.out(pooled)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(8, 32)
        self.pool = Pool(32)
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 12)

    def forward(self, x):
        return self.head(self.norm(self.pool(F.gelu(self.embed(x)))))


torch.manual_seed(6)
means = 0.5 * torch.randn(12, 8)
spread = 0.5 + torch.rand(12, 8)


def batch(n=16, points=1400):
    y = torch.randint(0, 12, (n,))
    return means[y][:, None] + spread[y][:, None] * torch.randn(n, points, 8), y


model = Net()
if not PLAIN:
    ottava.convert(model.pool, "tensorwise")
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
losses = []
for step in range(120):
    x, y = batch()
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 10 == 0:
        print(step, f"{losses[-1]:.4f}")
print(f"loss {sum(losses[-10:]) / 10:.4f}")
