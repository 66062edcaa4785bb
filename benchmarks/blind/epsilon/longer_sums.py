"""A curriculum: a GRU adds numbers of one digit, then of two, three and four; FP8 layers by ottava."""
import torch
import torch.nn.functional as F
from torch import nn

import ottava
from models import Report


class Adder(nn.Module):
    def __init__(self, dim=128):
        super().__init__()
        self.emb = nn.Embedding(10, 32)
        self.mix = nn.Sequential(nn.Linear(64, dim), nn.GELU(), nn.Linear(dim, dim))
        self.rnn = nn.GRU(dim, 64, batch_first=True)
        self.head = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10))

    def forward(self, a, b):
        h, _ = self.rnn(self.mix(torch.cat([self.emb(a), self.emb(b)], -1)))
        return self.head(h)


def draw(n, digits):
    """Digits of two numbers, the last digit first, and of their sum."""
    power = 10 ** torch.arange(digits)
    a, b = torch.randint(0, 10 ** digits, (2, n, 1))
    return a // power % 10, b // power % 10, (a + b) // power % 10


torch.manual_seed(0)
model = Adder()
ottava.convert(model, "rowwise")
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
report = Report()
for step in range(300):
    a, b, total = draw(128, 1 + step // 75)
    loss = F.cross_entropy(model(a, b).flatten(0, 1), total.flatten())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    report.add(loss)
report.end()
