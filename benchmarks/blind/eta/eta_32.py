"""A character model that reads one kind of text, then another, BF16 autocast."""

import argparse
import sys
from pathlib import Path

import torch
from torch import nn

mode, plain = sys.argv[1], "plain" in sys.argv
torch.manual_seed(5)
code = torch.tensor(list(Path(argparse.__file__).read_bytes()[:50000])).clamp(max=127)
numbers = torch.tensor(list(" ".join(str(i * i % 9973) for i in range(12000)).encode()))
T = 48


class Model(nn.Module):
    def __init__(self, d=96):
        super().__init__()
        self.token, self.place = nn.Embedding(128, d), nn.Embedding(T, d)
        layer = nn.TransformerEncoderLayer(d, 4, 4 * d, dropout=0.1, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, 128)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(T))

    def forward(self, x):
        h = self.token(x) + self.place.weight
        return self.head(self.norm(self.body(h, mask=self.mask, is_causal=True)))


model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1.5e-3, betas=(0.9, 0.99))
losses = []
for step in range(110):
    source = code if step < 55 else numbers
    at = torch.randint(0, len(source) - T - 1, (12,)).tolist()
    piece = torch.stack([source[i : i + T + 1] for i in at])
    for group in optimizer.param_groups:
        group["lr"] = 1.5e-3 * min(1.0, (step + 1) / 10)
    with torch.autocast("cpu", torch.bfloat16, enabled=not plain):
        logits = model(piece[:, :-1])
    loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), piece[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    losses.append(loss.item())
    if step % 10 == 0:
        print(f"step {step} loss {losses[-1]:.4f}")
print(f"loss {sum(losses[-15:]) / 15:.4f}")
