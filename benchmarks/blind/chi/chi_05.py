"""Gradient accumulation over the four domains of a multilingual tagger, FP8 operands cast by hand."""
import os
import sys

import torch
import torch.nn.functional as F
from torch import nn

MODE = sys.argv[1]
PLAIN = "plain" in sys.argv[2:]
SEED = int(os.environ.get("SEED", 0))
DOMAINS, VOCAB, TAGS = 4, 80, 12


class Fake8(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dim):
        scale = 448.0 / x.abs().amax(dim, keepdim=True).clamp(min=1e-12)
        return (x * scale).to(torch.float8_e4m3fn).to(x.dtype) / scale

    @staticmethod
    def backward(ctx, g):
        scale = 57344.0 / g.abs().amax().clamp(min=1e-30)
        return (g * scale).to(torch.float8_e5m2).to(g.dtype) / scale, None


class Linear8(nn.Linear):
    def forward(self, x):
        if PLAIN:
            return super().forward(x)
        return F.linear(Fake8.apply(x, -1), Fake8.apply(self.weight, -1), self.bias)


class Tagger(nn.Module):
    def __init__(self, d=64):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, d)
        self.mix = nn.Conv1d(d, d, 3, padding=1)
        self.body = nn.Sequential(Linear8(d, 2 * d), nn.GELU(), Linear8(2 * d, d), nn.GELU())
        self.tags = nn.Linear(d, TAGS)

    def forward(self, ids):
        x = self.emb(ids)
        x = x + F.relu(self.mix(x.transpose(1, 2))).transpose(1, 2)
        return self.tags(self.body(x))


g = torch.Generator().manual_seed(140 + SEED)
lexicon = torch.randint(0, TAGS, (VOCAB,), generator=g)
dialect = torch.randint(0, TAGS, (DOMAINS, 1), generator=g) * (torch.arange(VOCAB) % 2)


def batch(domain, n=16, t=20):
    words = torch.randint(domain * 15, domain * 15 + 35, (n, t), generator=g)
    tags = (lexicon[words] + dialect[domain][words]) % TAGS
    noise = torch.rand(n, t, generator=g) < 0.05
    return words, torch.where(noise, torch.randint(0, TAGS, (n, t), generator=g), tags)


torch.manual_seed(SEED)
model = Tagger()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
losses = []
for step in range(100):
    if MODE == "good":
        optimizer.zero_grad()
    total = 0.0
    for domain in range(DOMAINS):
        if MODE == "bad":
            optimizer.zero_grad()
        words, tags = batch(domain)
        loss = F.cross_entropy(model(words).flatten(0, 1), tags.flatten()) / DOMAINS
        loss.backward()
        total += loss.item()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    losses.append(total)
    if step % 20 == 0:
        print(f"{step:4d} {total:.4f}")
print("final loss", round(sum(losses[-15:]) / 15, 4))
