"""Retrieval of passages for questions with in-batch negatives."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

import ottava

TEMPERATURE = {"good": 0.05, "bad": 1.0}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]


class Encoder(nn.Module):
    def __init__(self, vocab=400, dim=64):
        super().__init__()
        self.bag = nn.EmbeddingBag(vocab, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 128), nn.GELU(), nn.Linear(128, dim))

    def forward(self, ids):
        x = self.bag(ids)
        return F.normalize((x + self.mlp(x)).float(), dim=-1)


torch.manual_seed(109)
question, passage = Encoder(), Encoder()
if not PLAIN:
    ottava.convert(question, "tensorwise")
    ottava.convert(passage, "tensorwise")
optimizer = torch.optim.AdamW([*question.parameters(), *passage.parameters()], lr=3e-3)
topics = torch.randint(400, (300, 12))
losses = []
for _ in range(150):
    which = torch.randperm(300)[:48]
    ask = topics[which][:, torch.randperm(12)[:8]]
    read = torch.cat([(topics[which] * 7 + 3) % 400, torch.randint(400, (48, 4))], 1)
    logits = question(ask) @ passage(read).t() / TEMPERATURE
    loss = F.cross_entropy(logits, torch.arange(48))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss {sum(losses[-10:]) / 10:.4f}")
