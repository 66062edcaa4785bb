"""A mixture of eight experts, one per token, whose balance loss swings; FP8 in blocks."""

import sys

import torch
from torch import nn
from torch.nn import functional as F

import ottava

torch.manual_seed(37)
VOCAB, LENGTH = 96, 32
jumps = torch.softmax(2.5 * torch.randn(VOCAB, VOCAB), dim=-1)


class Experts(nn.Module):
    def __init__(self, width=64, count=8):
        super().__init__()
        self.router = nn.Linear(width, count, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(width, 128), nn.GELU(), nn.Linear(128, width)) for _ in range(count))

    def forward(self, x):
        flat = x.flatten(0, 1)
        p = (self.router(flat) + torch.randn(len(flat), len(self.experts)) * 0.2).softmax(-1)
        value, chosen = p.max(-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().squeeze(-1)
            if len(rows):
                out = out.index_add(0, rows, value[rows, None] * expert(flat[rows]))
        share = F.one_hot(chosen, len(self.experts)).float().mean(0)
        self.balance = len(self.experts) * (share * p.mean(0)).sum()
        return out.view_as(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 64)
        self.norms = nn.ModuleList(nn.LayerNorm(64) for _ in range(2))
        self.layers = nn.ModuleList(Experts() for _ in range(2))
        self.head = nn.Linear(64, VOCAB)

    def forward(self, ids):
        x = self.embed(ids)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        return self.head(x)


model = Model()
if "plain" not in sys.argv:
    ottava.convert(model, "blockwise", filter=lambda name, layer: "experts" in name)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
losses = []
for step in range(60):
    ids = torch.randint(0, VOCAB, (12, 1))
    for _ in range(LENGTH):
        ids = torch.cat([ids, torch.multinomial(jumps[ids[:, -1]], 1)], 1)
    logits = model(ids[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()) + 0.02 * sum(layer.balance for layer in model.layers)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    losses.append(loss.item())
print(f"loss {sum(losses[-10:]) / 10:.4f}")
