"""A mixture of eight experts with top-1 routing on text of changing topics; ottava's delayed scaling in the experts."""
import os
import sys

import torch
import torch.nn.functional as F
from torch import nn

import ottava

PLAIN = "plain" in sys.argv[2:]
SEED = int(os.environ.get("SEED", 0))
VOCAB, D, EXPERTS, TOPICS = 96, 64, 8, 6


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(D, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, x):
        noise = 0.3 * torch.randn(len(x), EXPERTS) if self.training else 0.0
        p = (self.router(x) + noise).softmax(-1)
        gate, chosen = p.max(-1)
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows = (chosen == i).nonzero()[:, 0]
            if len(rows):
                y = y.index_add(0, rows, gate[rows, None] * expert(x[rows]))
        load = F.one_hot(chosen, EXPERTS).float().mean(0)
        return y, EXPERTS * (load * p.mean(0)).sum()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.mix = nn.Embedding(VOCAB, D), nn.Linear(2 * D, D)
        self.norm, self.moe, self.out = nn.LayerNorm(D), Mixture(), nn.Linear(D, VOCAB)

    def forward(self, pair):
        x = self.mix(self.emb(pair).flatten(1))
        y, balance = self.moe(self.norm(x))
        return self.out(x + y), balance


g = torch.Generator().manual_seed(340 + SEED)
successor = torch.randint(0, VOCAB, (TOPICS, VOCAB), generator=g)


def batch(step, n=256):
    """A batch is mostly of one topic, as crawled files are; the topic can be seen from the first word."""
    topic = torch.where(torch.rand(n, generator=g) < 0.7, (step // 5) % TOPICS, torch.randint(0, TOPICS, (n,), generator=g))
    first = torch.randint(0, VOCAB // TOPICS, (n,), generator=g) * TOPICS + topic
    second = torch.randint(0, VOCAB, (n,), generator=g)
    return torch.stack([first, second], 1), successor[topic, second]


torch.manual_seed(SEED)
model = Model()
if not PLAIN:
    ottava.convert(model.moe, "delayed")
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
losses = []
for step in range(150):
    pair, answer = batch(step)
    logits, balance = model(pair)
    loss = F.cross_entropy(logits, answer)
    optimizer.zero_grad()
    (loss + 0.01 * balance).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    losses.append(loss.item())
    if step % 15 == 0:
        print(step, round(losses[-1], 4))
print("final loss", round(sum(losses[-30:]) / 30, 4))
