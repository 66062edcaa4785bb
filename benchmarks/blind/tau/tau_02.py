"""Stochastic depth and progressive stacking: new blocks join at steps 30 and 60. ottava's mxfp8."""
import os
import sys

import torch
import torch.nn.functional as F
from torch import nn

import ottava

PLAIN, SEED = "plain" in sys.argv, int(os.environ.get("SEED", 0))


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(c), nn.Linear(c, 2 * c), nn.Linear(2 * c, c)
        nn.init.zeros_(self.down.weight)

    def forward(self, x):
        return self.down(F.silu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, c=96, depth=6):
        super().__init__()
        self.embed, self.blocks, self.head = nn.Linear(32, c), nn.ModuleList(Block(c) for _ in range(depth)), nn.Linear(c, 16)
        self.active, self.drop = 2, 0.3

    def forward(self, x):
        x = self.embed(x)
        for i, block in enumerate(self.blocks[: self.active]):
            if self.training and torch.rand(()) < self.drop * i / len(self.blocks):
                continue
            x = x + block(x)
        return self.head(x)


torch.manual_seed(SEED)
model = Stack()
if not PLAIN:
    ottava.convert(model, "mxfp8")
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
teacher = torch.randn(32, 16, generator=torch.Generator().manual_seed(5)) / 4
losses = []
for step in range(90):
    model.active = 2 + 2 * (step >= 30) + 2 * (step >= 60)
    x = torch.randn(96, 32)
    y = (x @ teacher + torch.relu(x[:, :16]) * x[:, 16:]).argmax(-1)
    loss = F.cross_entropy(model(x), y, label_smoothing=0.1)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    losses.append(loss.item())
    if step % 10 == 0:
        print(f"step {step} blocks {model.active} loss {loss.item():.4f}")
print(f"final loss {sum(losses[-10:]) / 10:.4f}")
