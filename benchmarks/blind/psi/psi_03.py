"""A small language model under warm restarts of the learning rate."""
import os
import sys

import torch
import torch.nn as nn
import torch.nn.functional as F
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

mode, plain = sys.argv[1], "plain" in sys.argv
torch.manual_seed(int(os.environ.get("SEED", 0)))
VOCAB, DIM, LENGTH, BATCH, STEPS = 64, 64, 32, 16, 160


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (y.view(b, t, 4, -1).transpose(1, 2) for y in self.qkv(self.norm1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, DIM))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCAB, DIM), nn.Embedding(LENGTH, DIM)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB)

    def forward(self, ids):
        return self.head(self.norm(self.blocks(self.embed(ids) + self.place.weight)))


chain = torch.softmax(2.5 * torch.randn(VOCAB, VOCAB), -1)


def batch():
    ids = torch.randint(0, VOCAB, (BATCH, 1))
    for _ in range(LENGTH):
        ids = torch.cat([ids, torch.multinomial(chain[ids[:, -1]], 1)], 1)
    return ids[:, :-1], ids[:, 1:]


model = Model()
if not plain:
    config = Float8LinearConfig.from_recipe_name("tensorwise")
    object.__setattr__(config, "emulate", True)
    convert_to_float8_training(model.blocks, config=config)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2, betas=(0.9, 0.95))
schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=40, eta_min=1e-4)

losses = []
for step in range(STEPS):
    x, y = batch()
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    losses.append(loss.item())
print(f"final loss {sum(losses[-20:]) / 20:.4f}")
