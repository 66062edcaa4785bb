"""Attention over long sets of measurements; queries, keys, values and probabilities go through FP8."""
import os
import sys

import torch
import torch.nn as nn

mode, plain = sys.argv[1], "plain" in sys.argv
torch.manual_seed(int(os.environ.get("SEED", 0)))
DIM, HEADS, LENGTH, BATCH, STEPS = 32, 2, 1536, 4, 80
F8 = torch.float8_e4m3fn


class Cast(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        return (x * scale).clamp(-448, 448).to(F8).to(x.dtype) / scale

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def fp8(x, scale=None):
    if plain:
        return x
    if scale is None:
        scale = 448 / x.detach().abs().amax().clamp(min=1e-12)
    return Cast.apply(x, scale)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(DIM, DIM), nn.Linear(DIM, 2 * DIM), nn.Linear(DIM, DIM)

    def forward(self, question, items):
        b, n, _ = items.shape
        q = self.q(question).view(b, -1, HEADS, DIM // HEADS).transpose(1, 2)
        k, v = (y.view(b, n, HEADS, DIM // HEADS).transpose(1, 2) for y in self.kv(items).chunk(2, -1))
        scores = fp8(q) @ fp8(k).transpose(-1, -2) / (DIM // HEADS) ** 0.5
        p = scores.softmax(-1)
        y = fp8(p, 1.0 if mode == "bad" else 448.0) @ fp8(v)
        return self.out(y.transpose(1, 2).reshape(b, -1, DIM))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(3, DIM), nn.GELU(), nn.Linear(DIM, DIM))
        self.ask = nn.Linear(2, DIM)
        self.attention = Attention()
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Sequential(nn.Linear(2 * DIM, 64), nn.GELU(), nn.Linear(64, 1))

    def forward(self, items, where):
        q = self.ask(where)
        y = self.attention(self.norm(q), self.embed(items))
        return self.head(torch.cat([q, y], -1)).squeeze(-1)


def batch():
    """A random field; the answer at a place is its smooth value there."""
    place = torch.rand(BATCH, LENGTH, 2) * 2 - 1
    slope, level = torch.randn(BATCH, 2), torch.randn(BATCH)
    value = (place * slope[:, None]).sum(-1) + level[:, None] + 0.3 * torch.randn(BATCH, LENGTH)
    where = torch.rand(BATCH, 32, 2) * 2 - 1
    return torch.cat([place, value[..., None]], -1), where, (where * slope[:, None]).sum(-1) + level[:, None]


model = Model()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
losses = []
for step in range(STEPS):
    items, where, target = batch()
    loss = (model(items, where) - target).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 20 == 0:
        print(f"step {step} loss {loss.item():.4f}")
print(f"final loss {sum(losses[-20:]) / 20:.4f}")
