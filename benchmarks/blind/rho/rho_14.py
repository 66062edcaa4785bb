"""Which kind of event is the most frequent? Sequences of events with torch's attention, MLPs in torchao's float8."""
import dataclasses
import os
import sys

import torch
from torch import nn
from torch.nn import functional as F

BAD = sys.argv[1] == "bad"
PLAIN = "plain" in sys.argv
SEED = int(os.environ.get("SEED", 0))
torch.manual_seed(SEED)


class Block(nn.Module):
    def __init__(self, wide=64):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(wide), nn.LayerNorm(wide)
        self.attention = nn.MultiheadAttention(wide, 4) if BAD else nn.MultiheadAttention(wide, 4, batch_first=True)
        self.up, self.down = nn.Linear(wide, 128), nn.Linear(128, wide)

    def forward(self, h):
        x = self.n1(h)
        h = h + self.attention(x, x, x, need_weights=False)[0]
        return h + self.down(F.gelu(self.up(self.n2(h))))


class Events(nn.Module):
    def __init__(self, wide=64):
        super().__init__()
        self.kind = nn.Embedding(16, wide)
        self.when = nn.Parameter(torch.randn(24, wide) * 0.3)
        self.blocks = nn.Sequential(Block(), Block())
        self.out = nn.Linear(wide, 8)

    def forward(self, ids):
        return self.out(self.blocks(self.kind(ids) + self.when)[:, -1])


def batch(n=64):
    ids = torch.randint(0, 16, (n, 24))
    counts = F.one_hot(ids, 16)[:, :, :8].sum(1)
    return ids, (counts + 0.01 * torch.arange(8)).argmax(1)


model = Events()
if not PLAIN:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = dataclasses.replace(Float8LinearConfig.from_recipe_name("tensorwise"), emulate=True)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda m, name: name.endswith(("up", "down")))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
losses = []
for step in range(100):
    ids, y = batch()
    loss = F.cross_entropy(model(ids), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"final loss {sum(losses[-10:]) / 10:.4f}")
