"""A small transformer on a noisy grammar under ottava's delayed scaling."""
import sys

import torch
from torch import nn

import ottava

MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]
HISTORY = {"good": {"margin": 1, "amax_history_len": 16}, "bad": {"margin": 17, "amax_history_len": 16}}[MODE]


class Block(nn.Module):
    def __init__(self, width, heads=4):
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.n1(x)).chunk(3, -1))
        a = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(a.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.n2(x))))


class Model(nn.Module):
    def __init__(self, vocab=32, width=64, length=24):
        super().__init__()
        self.embed, self.pos = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab)

    def forward(self, ids):
        return self.head(self.norm(self.blocks(self.embed(ids) + self.pos.weight[: ids.shape[1]])))


torch.manual_seed(16)
model = Model()
if not PLAIN:
    ottava.convert(model, ottava.get_recipe("delayed", **HISTORY), filter=lambda name, layer: name.startswith("blocks"))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
table = torch.randint(32, (4, 16))
losses = []
for step in range(110):
    ids = torch.randint(32, (32, 2))
    for _ in range(17):
        follow = table[ids[:, -2] // 8, ids[:, -1] // 2][:, None]
        ids = torch.cat([ids, torch.where(torch.rand(32, 1) < 0.85, follow, torch.randint(32, (32, 1)))], 1)
    loss = nn.functional.cross_entropy(model(ids[:, :-1])[:, 1:].flatten(0, 1), ids[:, 2:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"first {losses[0]:.4f}")
print(f"loss {sum(losses[-10:]) / 10:.4f}")
