"""Decoder with rotary positions; the task is to say which token came a given number of places before."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

import ottava

SEQ_DIM = {"good": 1, "bad": 2}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]
VOCAB, LENGTH, DIM, HEADS = 24, 32, 64, 4


def rotate(x, seq_dim):
    """x: [batch, sequence, heads, channels]"""
    half = x.shape[-1] // 2
    frequencies = 100.0 ** (-torch.arange(half) / half)
    shape = [1] * x.ndim
    shape[seq_dim], shape[-1] = x.shape[seq_dim], half
    angles = (torch.arange(x.shape[seq_dim])[:, None] * frequencies).view(shape)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.up, self.down = nn.Linear(DIM, 4 * DIM, bias=False), nn.Linear(4 * DIM, DIM, bias=False)

    def forward(self, x):
        b, s, _ = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, s, 3, HEADS, -1).unbind(2)
        q, k = rotate(q, SEQ_DIM), rotate(k, SEQ_DIM)
        a = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(b, s, DIM))
        return x + self.down(F.silu(self.up(self.n2(x))))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.RMSNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, x):
        x = self.tokens(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


torch.manual_seed(0)
model = Decoder()
if not PLAIN:
    ottava.convert(model, "mxfp8", filter=lambda name, layer: "blocks" in name)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
losses = []
for _step in range(180):
    x = torch.randint(0, VOCAB, (16, LENGTH))
    logits = model(x)[:, 3:]
    target = x[:, :-3]
    loss = F.cross_entropy(logits.flatten(0, 1), target.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss {sum(losses[-10:]) / 10:.4f}")
