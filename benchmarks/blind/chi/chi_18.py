"""A curriculum: sort 4, then 6, then 8 numbers with a small transformer; FP8 operands by hand, a scale for each row."""
import os
import sys

import torch
import torch.nn.functional as F
from torch import nn

PLAIN = "plain" in sys.argv[2:]
SEED = int(os.environ.get("SEED", 0))
VOCAB, D = 32, 64


class Fake8(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        s = 448.0 / x.abs().amax(-1, keepdim=True).clamp(min=1e-12)
        return (x * s).to(torch.float8_e4m3fn).to(x.dtype) / s

    @staticmethod
    def backward(ctx, g):
        s = 57344.0 / g.abs().amax(-1, keepdim=True).clamp(min=1e-30)
        return (g * s).to(torch.float8_e5m2).to(g.dtype) / s


class Linear8(nn.Linear):
    def forward(self, x):
        return super().forward(x) if PLAIN else F.linear(Fake8.apply(x), Fake8.apply(self.weight), self.bias)


class Block(nn.Module):
    def __init__(self, heads=4):
        super().__init__()
        self.heads, self.n1, self.n2 = heads, nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.proj = Linear8(D, 3 * D), Linear8(D, D)
        self.up, self.down = Linear8(D, 4 * D), Linear8(4 * D, D)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, D)
        x = x + self.proj(y)
        return x + self.down(F.gelu(self.up(self.n2(x))))


class Sorter(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.pos = nn.Embedding(VOCAB, D), nn.Parameter(0.1 * torch.randn(8, D))
        self.blocks, self.norm, self.out = nn.Sequential(Block(), Block()), nn.LayerNorm(D), nn.Linear(D, VOCAB)

    def forward(self, ids):
        return self.out(self.norm(self.blocks(self.emb(ids) + self.pos[: ids.shape[1]])))


torch.manual_seed(SEED)
g = torch.Generator().manual_seed(310 + SEED)
model = Sorter()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
losses = []
for step in range(180):
    length = (4, 6, 8)[step // 60]
    ids = torch.randint(0, VOCAB, (48, length), generator=g)
    loss = F.cross_entropy(model(ids).flatten(0, 1), ids.sort(1).values.flatten())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    losses.append(loss.item())
    if step % 20 == 0:
        print(f"length {length} step {step} loss {losses[-1]:.4f}")
print("final loss", round(sum(losses[-15:]) / 15, 4))
