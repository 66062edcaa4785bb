"""Data, networks and casts that the scripts share."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def start():
    """Seeds torch; which variant to run."""
    torch.manual_seed(0)
    return sys.argv[1] == "bad"


def learn(step, optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, round(loss.item(), 5))


class Markov:
    """Text of a random Markov chain: each token has `branch` likely successors."""

    def __init__(self, vocab, branch=4, seed=0):
        self.g = torch.Generator().manual_seed(seed)
        self.vocab, self.branch = vocab, branch
        self.successors = torch.randint(vocab, (vocab, branch), generator=self.g)

    def batch(self, size, length):
        tokens = [torch.randint(self.vocab, (size,), generator=self.g)]
        picks = (torch.rand(length, size, generator=self.g) ** 2 * self.branch).long()
        for pick in picks:
            tokens.append(self.successors[tokens[-1], pick])
        return torch.stack(tokens, 1)


def shapes(size, g, side=16, noise=0.3):
    """Images of bars, boxes, crosses and discs with noise, and their classes."""
    label = torch.randint(4, (size,), generator=g)
    cx, cy = torch.randint(4, side - 4, (2, size, 1, 1), generator=g)
    r = torch.randint(2, 5, (size, 1, 1), generator=g)
    x, y = torch.arange(side).view(1, 1, -1) - cx, torch.arange(side).view(1, -1, 1) - cy
    near = torch.maximum(x.abs(), y.abs()) <= r
    kinds = [near & (y.abs() <= 0), near & (torch.maximum(x.abs(), y.abs()) == r), near & ((x == 0) | (y == 0))]
    kinds.append(x.square() + y.square() <= r * r)
    image = torch.stack(kinds, 1)[torch.arange(size), label].float()
    return (image + noise * torch.randn(size, side, side, generator=g)).unsqueeze(1), label


class Block(nn.Module):
    def __init__(self, width, heads, linear, causal, dropout=0.0):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = linear(width, 3 * width), linear(width, width)
        self.up, self.down = linear(width, 4 * width), linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        b, s, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, s, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).reshape(b, s, w)
        x = x + self.dropout(self.out(a))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class Decoder(nn.Module):
    """A small GPT."""

    def __init__(self, vocab, width=96, depth=2, heads=4, length=64, linear=nn.Linear, tied=False, dropout=0.0):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab, width), nn.Embedding(length, width)
        nn.init.normal_(self.tokens.weight, std=0.05)
        nn.init.normal_(self.places.weight, std=0.05)
        self.blocks = nn.ModuleList(Block(width, heads, linear, True, dropout) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids):
        x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, ids, smoothing=0.0):
        logits = self(ids[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), label_smoothing=smoothing)


class ViT(nn.Module):
    def __init__(self, width=96, depth=3, classes=4, patch=4, side=16, linear=nn.Linear, dropout=0.0):
        super().__init__()
        self.patches = nn.Conv2d(1, width, patch, patch)
        self.places = nn.Parameter(0.02 * torch.randn((side // patch) ** 2, width))
        self.blocks = nn.ModuleList(Block(width, 4, linear, False, dropout) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


def to8(x, dtype=E4M3):
    limit = torch.finfo(dtype).max
    return x.clamp(-limit, limit).to(dtype).to(x.dtype)


def to8_stochastic(x):
    """Nearest of x plus noise as wide as the spacing of E4M3 at x."""
    step = torch.exp2(torch.floor(torch.log2(x.abs().clamp(min=2**-6))) - 3)
    return (torch.floor(x / step + torch.rand_like(x)) * step).clamp(-448, 448)


def cast8(x, dtype=E4M3, dim=None):
    """A round trip through FP8 with one scale for all, or one for each slice along dim."""
    amax = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
    scale = torch.finfo(dtype).max / amax.clamp(min=1e-12)
    return to8(x * scale, dtype) / scale


def cast_blocks(x, block=32):
    """A round trip through E4M3 in blocks of the last dimension whose scales are powers of two."""
    parts = x.reshape(*x.shape[:-1], -1, block)
    scale = torch.exp2(torch.floor(torch.log2(448 / parts.abs().amax(-1, keepdim=True).clamp(min=1e-20))))
    return (to8(parts * scale) / scale).view_as(x)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, layer):
        x, w = layer.cast(x, "x"), layer.cast(w, "w")
        ctx.save_for_backward(x, w)
        ctx.layer = layer
        return x @ w.t()

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        g = ctx.layer.cast(g, "g")
        return g @ w, g.flatten(0, -2).t() @ x.flatten(0, -2), None


class Fp8Linear(nn.Linear):
    """Current scaling, one scale a tensor."""

    def __init__(self, *sizes, grad=E5M2, scaled="xwg", bias=True):
        super().__init__(*sizes, bias=bias)
        self.grad, self.scaled = grad, scaled

    def cast(self, t, role):
        dtype = self.grad if role == "g" else E4M3
        return cast8(t, dtype) if role in self.scaled else to8(t, dtype)

    def forward(self, x):
        y = Product.apply(x, self.weight, self)
        return y if self.bias is None else y + self.bias


class BlockLinear(Fp8Linear):
    """Scales for blocks of 32."""

    def cast(self, t, role):
        return cast_blocks(t)


class DelayedLinear(Fp8Linear):
    """Scales of the amaxes of earlier steps."""

    def __init__(self, *sizes, history=16, record_steps=None, bias=True):
        super().__init__(*sizes, bias=bias)
        self.record_steps = record_steps
        for role in "xwg":
            self.register_buffer(f"amax_{role}", torch.zeros(history))
        self.register_buffer("calls", torch.zeros(3, dtype=torch.long))

    def cast(self, t, role):
        amax, i = getattr(self, f"amax_{role}"), "xwg".index(role)
        if self.training and (self.record_steps is None or self.calls[i] < self.record_steps):
            if self.calls[i] == 0:
                amax.fill_(t.abs().max())
            past = amax.max()
            amax[self.calls[i] % len(amax)] = t.abs().max()
        else:
            past = amax.max()
        self.calls[i] += self.training
        dtype = E5M2 if role == "g" else E4M3
        scale = torch.finfo(dtype).max / past.clamp(min=1e-12)
        return to8(t * scale, dtype) / scale
