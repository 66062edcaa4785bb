"""Curriculum: the sequences to sort get longer in stages, so the loss rises at each stage."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

import ottava

PLAIN = "plain" in sys.argv[2:]
STAGES = [(0, 4), (50, 8), (100, 12), (150, 16)]

torch.manual_seed(0)
embed = nn.Embedding(33, 64)
place = nn.Embedding(16, 64)
encoder = nn.TransformerEncoder(
    nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True, norm_first=True),
    2,
    enable_nested_tensor=False,
)
head = nn.Linear(64, 33)
model = nn.ModuleList([embed, place, encoder, head])
if not PLAIN:
    ottava.convert(model, "blockwise")
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
losses = []
for step in range(190):
    length = max(n for start, n in STAGES if step >= start)
    x = torch.randint(0, 33, (32, length))
    y = x.sort(1).values
    hidden = encoder(embed(x) + place(torch.arange(length)))
    loss = F.cross_entropy(head(hidden).flatten(0, 1), y.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss {sum(losses[-10:]) / 10:.4f}")
