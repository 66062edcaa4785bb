"""Masked diffusion on tokens: a random share is hidden, the loss is weighted by one over that share. Casts by hand."""
import os
import sys

import torch
from torch import nn
from torch.nn import functional as F

SEED = int(os.environ.get("SEED", "0"))
PLAIN = "plain" in sys.argv[2:]


class Cast8(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t, backward_too):
        ctx.too = backward_too
        return Cast8.run(t, torch.float8_e4m3fn)

    @staticmethod
    def backward(ctx, g):
        return (Cast8.run(g, torch.float8_e5m2) if ctx.too else g), None

    @staticmethod
    def run(t, dtype):
        s = torch.finfo(dtype).max / t.abs().amax().clamp(min=1e-12)
        return (t * s).to(dtype).to(t.dtype) / s


class Out8(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        return y.view_as(y)

    @staticmethod
    def backward(ctx, g):
        return Cast8.run(g, torch.float8_e5m2)


class Lin8(nn.Linear):
    def forward(self, x):
        if PLAIN:
            return super().forward(x)
        return Out8.apply(F.linear(Cast8.apply(x, False), Cast8.apply(self.weight, False), self.bias))


class Block(nn.Module):
    def __init__(self, dim=48):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.o, self.up, self.down = Lin8(dim, 3 * dim), Lin8(dim, dim), Lin8(dim, 2 * dim), Lin8(2 * dim, dim)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).reshape(b, t, 3, 4, d // 4).permute(2, 0, 3, 1, 4)
        x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.n2(x))))


torch.manual_seed(SEED)
VOCAB, T = 24, 16
embed, place = nn.Embedding(VOCAB + 1, 48), nn.Parameter(torch.randn(T, 48) * 0.5)
body, head = nn.Sequential(Block(), Block(), nn.LayerNorm(48)), nn.Linear(48, VOCAB)
parameters = [*embed.parameters(), place, *body.parameters(), *head.parameters()]
optimizer = torch.optim.AdamW(parameters, lr=3e-3, betas=(0.9, 0.98))
tail = []
for step in range(90):
    start, stride = torch.randint(0, VOCAB, (24, 1)), torch.randint(1, 4, (24, 1))
    ids = (start + stride * torch.arange(T)) % VOCAB
    share = torch.rand(24, 1) * 0.95 + 0.05
    hidden = torch.rand(24, T) < share
    h = embed(torch.where(hidden, torch.full_like(ids, VOCAB), ids)) + place
    each = F.cross_entropy(head(body(h)).flatten(0, 1), ids.flatten(), reduction="none").reshape(24, T)
    loss = (each * hidden / share).sum() / ids.numel()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
    tail.append(loss.item())
    if step % 10 == 0:
        print(step, round(loss.item(), 4))
print(f"final loss {sum(tail[-15:]) / 15:.4f}")
