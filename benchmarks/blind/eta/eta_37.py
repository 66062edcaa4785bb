"""A character model with casts written by hand."""

import sys
import textwrap
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

mode, plain = sys.argv[1], "plain" in sys.argv
torch.manual_seed(32)
text = torch.tensor(list(Path(textwrap.__file__).read_bytes())).clamp(max=127)
T = 32


def batch(rows):
    at = torch.randint(0, len(text) - T - 1, (rows,)).tolist()
    piece = torch.stack([text[i : i + T + 1] for i in at])
    return piece[:, :-1], piece[:, 1:]


def cast(x, kind, scaled=True):
    if plain:
        return x
    scale = torch.finfo(kind).max / x.detach().abs().amax().clamp(min=1e-12) if scaled else 1.0
    return (x * scale).to(kind).to(x.dtype) / scale


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        x, w = cast(x, torch.float8_e4m3fn), cast(w, torch.float8_e4m3fn)
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        dy = cast(dy, torch.float8_e4m3fn, scaled=mode == "good")
        return dy @ w, dy.flatten(0, -2).t() @ x.flatten(0, -2)


class Linear8(nn.Linear):
    def forward(self, x):
        return Product.apply(x, self.weight) + self.bias


class Block(nn.Module):
    def __init__(self, d, heads=4):
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = Linear8(d, 3 * d), Linear8(d, d)
        self.up, self.down = Linear8(d, 3 * d), Linear8(3 * d, d)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.n2(x))))


model = nn.Sequential(nn.Embedding(128, 64), Block(64), Block(64), nn.LayerNorm(64), nn.Linear(64, 128))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
losses = []
for step in range(90):
    x, y = batch(16)
    loss = F.cross_entropy(model(x).flatten(0, 1).float(), y.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 10 == 0:
        print(f"step {step} loss {losses[-1]:.4f}")
print(f"loss {sum(losses[-15:]) / 15:.4f}")
