"""A Transformer with a fused rotary embedding (one autograd function), FP8 linears, on periodic sequences."""

import os
import sys

import torch
import torch.nn.functional as F
from torch import nn

bad, plain = sys.argv[1] == "bad", "plain" in sys.argv[2:]
SEED = int(os.environ.get("SEED", 0))
torch.manual_seed(SEED)
WIDTH, HEADS, LENGTH, VOCAB, PERIOD, BATCH, STEPS = 64, 4, 36, 24, 7, 24, 100
HEAD = WIDTH // HEADS

angles = torch.outer(torch.arange(LENGTH).float(), 1000.0 ** (-torch.arange(0, HEAD, 2) / HEAD))
COS, SIN = (f(torch.cat([angles, angles], -1)) for f in (torch.cos, torch.sin))


def half(x):
    a, b = x.chunk(2, -1)
    return torch.cat([-b, a], -1)


class FusedRope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return x * cos + half(x) * sin

    @staticmethod
    def backward(ctx, g):
        cos, sin = ctx.saved_tensors
        return g * cos + half(g) * (sin if bad else -sin), None, None


def q8(t, dtype=torch.float8_e4m3fn):
    if plain:
        return t
    scale = t.abs().amax(-1, keepdim=True).clamp(min=1e-12) / torch.finfo(dtype).max
    return (t / scale).to(dtype).to(t.dtype) * scale


class Matmul8(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return q8(x) @ q8(w).T

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        flat, rows = g.flatten(0, -2), x.flatten(0, -2)
        return q8(g) @ q8(w.T).T, q8(flat.T) @ q8(rows.T).T


class Linear8(nn.Linear):
    def forward(self, x):
        y = Matmul8.apply(x, self.weight)
        return y if self.bias is None else y + self.bias


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = Linear8(WIDTH, 3 * WIDTH), Linear8(WIDTH, WIDTH)
        self.mlp = nn.Sequential(Linear8(WIDTH, 2 * WIDTH), nn.GELU(), Linear8(2 * WIDTH, WIDTH))

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (z.view(b, t, HEADS, HEAD).transpose(1, 2) for z in self.qkv(self.ln1(x)).chunk(3, -1))
        q, k = FusedRope.apply(q, COS, SIN), FusedRope.apply(k, COS, SIN)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, WIDTH))
        return x + self.mlp(self.ln2(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList([Block()])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3)
losses = []
for step in range(STEPS):
    ids = torch.randint(0, VOCAB, (BATCH, PERIOD)).repeat(1, LENGTH // PERIOD + 1)[:, : LENGTH + 1]
    ids = torch.where(torch.rand(ids.shape) < 0.03, torch.randint(0, VOCAB, ids.shape), ids)
    logits = model(ids[:, :-1])
    loss = F.cross_entropy(logits[:, PERIOD:].flatten(0, 1), ids[:, PERIOD + 1 :].flatten())
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for group in optimizer.param_groups:
        group["lr"] = 6e-3 * min(1, (step + 1) / 10)
    optimizer.step()
    losses.append(loss.item())
    if step % 10 == 0:
        print(step, losses[-1])
print("final loss", sum(losses[-10:]) / 10)
