"""Small models which the scripts of this folder share."""

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, width, heads, causal=True):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, mask=None):
        b, s, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, s, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=self.causal and mask is None)
        x = x + self.proj(a.transpose(1, 2).reshape(b, s, w))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class TinyLM(nn.Module):
    def __init__(self, vocab=64, width=64, depth=2, heads=4, length=64, causal=True, outputs=None):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, width), nn.Embedding(length, width)
        nn.init.normal_(self.tok.weight, std=0.5)
        nn.init.normal_(self.pos.weight, std=0.1)
        self.blocks = nn.ModuleList(Block(width, heads, causal) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, outputs or vocab)

    def features(self, ids, mask=None):
        x = self.tok(ids) + self.pos.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x, mask)
        return self.norm(x)

    def forward(self, ids, mask=None):
        return self.head(self.features(ids, mask))


class MLP(nn.Module):
    def __init__(self, *sizes, act=nn.GELU, norm=False):
        super().__init__()
        layers = []
        for i, (a, b) in enumerate(zip(sizes, sizes[1:])):
            layers.append(nn.Linear(a, b))
            if i < len(sizes) - 2:
                if norm:
                    layers.append(nn.LayerNorm(b))
                layers.append(act())
        self.net = nn.Sequential(*layers)

    def forward(self, x):
        return self.net(x)


def markov(batch, length, vocab=64, generator=None, noise=0.1):
    """Sequences x[t+1] = 5 x[t] + 3 (mod vocab), a tenth of the steps random."""
    x = torch.empty(batch, length, dtype=torch.long)
    x[:, 0] = torch.randint(vocab, (batch,), generator=generator)
    for t in range(1, length):
        x[:, t] = (5 * x[:, t - 1] + 3) % vocab
        jump = torch.rand(batch, generator=generator) < noise
        x[jump, t] = torch.randint(vocab, (int(jump.sum()),), generator=generator)
    return x
