"""Sorting lists of digits; the lists grow during training."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

import ottava

MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]
LENGTHS = [(0, 4), (50, 8), (100, 14)]


class Sorter(nn.Module):
    def __init__(self, recipe, dim=64):
        super().__init__()
        self.embed = nn.Embedding(11, dim)
        self.position = nn.Embedding(16, dim)
        self.layers = nn.ModuleList(
            ottava.nn.TransformerLayer(dim, 128, 4, mask="no_mask", recipe=recipe) for _ in range(2)
        )
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, 10)

    def forward(self, digits):
        x = self.embed(digits) + self.position.weight[: digits.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


torch.manual_seed(11)
model = Sorter("bf16" if PLAIN else "rowwise")
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
losses = []
for step in range(150):
    length = next(n for start, n in reversed(LENGTHS) if step >= start)
    digits = torch.randint(10, (32, length))
    logits = model(digits)
    loss = F.cross_entropy(logits.flatten(0, 1).float(), digits.sort(1).values.flatten())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    losses.append(loss.item())
print(f"loss {sum(losses[-10:]) / 10:.4f}")
