"""Parts that several of the training scripts share."""
import importlib.util
import pathlib

import torch
import torch.nn.functional as F
from torch import nn

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def to_fp8(x, dtype=E4M3, dim=None):
    """Codes and the scale that gives the numbers back: x is about codes * scale."""
    amax = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
    scale = amax.clamp(min=1e-12) / torch.finfo(dtype).max
    return (x / scale).to(dtype), scale


def round_fp8(x, dtype=E4M3, dim=None):
    codes, scale = to_fp8(x, dtype, dim)
    return codes.float() * scale


class Fp8MatMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        x8, w8 = round_fp8(x, dim=-1), round_fp8(w, dim=-1)
        ctx.save_for_backward(x8, w8)
        return x8 @ w8.t()

    @staticmethod
    def backward(ctx, g):
        x8, w8 = ctx.saved_tensors
        g8 = round_fp8(g, E5M2)
        return g8 @ w8, g8.flatten(0, -2).t() @ x8.flatten(0, -2)


class Fp8Linear(nn.Linear):
    def forward(self, x):
        y = Fp8MatMul.apply(x, self.weight)
        return y if self.bias is None else y + self.bias


def stdlib_text(*names, limit=200_000):
    """Source text of modules of Python's own library as byte ids below 128."""
    text = "".join(pathlib.Path(importlib.util.find_spec(n).origin).read_text() for n in names)
    return torch.tensor([min(c, 127) for c in text.encode("ascii", "replace")][:limit])


def windows(ids, batch, length, generator=None):
    start = torch.randint(0, len(ids) - length - 1, (batch,), generator=generator)
    return torch.stack([ids[s:s + length + 1] for s in start.tolist()])


class Block(nn.Module):
    """Pre-norm transformer block; linear is the class of its four layers."""

    def __init__(self, dim, heads, linear=nn.Linear):
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = linear(dim, 3 * dim), linear(dim, dim)
        self.up, self.down = linear(dim, 4 * dim), linear(4 * dim, dim)

    def forward(self, x, mask=None):
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(a.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.n2(x))))


class Report:
    """Collects losses, prints some of them, and the mean of the last 20 at the end."""

    def __init__(self, every=20, quiet=False):
        self.every, self.quiet, self.losses = every, quiet, []

    def add(self, loss):
        self.losses.append(float(torch.as_tensor(loss).detach()))
        if not self.quiet and len(self.losses) % self.every == 0:
            print(f"step {len(self.losses)} loss {self.losses[-1]:.4f}", flush=True)

    def end(self, **measures):
        last = self.losses[-20:]
        if not self.quiet:
            text = " ".join(f"{k} {float(v):.4f}" for k, v in measures.items())
            print(f"final loss {sum(last) / len(last):.4f} {text}".rstrip(), flush=True)
