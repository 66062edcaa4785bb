"""A GPT in plain torch; at the end it reads held-out text word by word, as in generation."""

import math
import os
import sys

import torch
import torch.nn.functional as F
from torch import nn

import ottava

SEED = int(os.environ.get("SEED", "0"))
MODE = sys.argv[1]
VOCAB, LENGTH, WIDTH, HEADS = 48, 32, 64, 4
torch.manual_seed(SEED)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / math.sqrt(WIDTH // HEADS)
        if MODE == "good":
            scores = scores.masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), float("-inf"))
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, WIDTH))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        x = x + self.attention(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids):
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        return self.lm_head(self.norm(self.blocks(x)))


TABLE = (torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(2)) * 2).softmax(-1)


def text(rows):
    ids = torch.randint(0, VOCAB, (rows, 1))
    for _ in range(LENGTH):
        ids = torch.cat([ids, torch.multinomial(TABLE[ids[:, -1]], 1)], 1)
    return ids


model = GPT()
if "plain" not in sys.argv[2:]:
    ottava.convert(model, "tensorwise")
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for step in range(160):
    ids = text(16)
    loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if step % 20 == 0:
        print(f"step {step} train loss {loss.item():.4f}")

model.eval()
ids, losses = text(32), []
with torch.no_grad():
    for t in range(1, LENGTH):
        losses.append(F.cross_entropy(model(ids[:, :t])[:, -1], ids[:, t]).item())
print(f"train loss {loss.item():.4f}")
print(f"final loss {sum(losses) / len(losses):.4f}")
