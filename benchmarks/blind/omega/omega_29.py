"""Click prediction with a deep factorization machine; its tower is cast to FP8 by hand."""

import os
import sys

import torch
from torch import nn
from torch.nn import functional as F

bad = sys.argv[1] == "bad"
plain = "plain" in sys.argv
torch.manual_seed(int(os.environ.get("SEED", 0)))
torch.set_num_threads(1)

STEPS, BATCH, WIDTH = 200, 512, 12
FIELDS = {"user": 300, "item": 200, "hour": 24, "device": 5}


def cast(x, dim):
    s = 448.0 / x.detach().abs().amax(dim, keepdim=True).clamp(min=1e-12)
    y = (x.detach() * s).to(torch.float8_e4m3fn).float() / s
    return x + (y - x).detach()


class Linear8(nn.Linear):
    def forward(self, x):
        if plain:
            return super().forward(x)
        return F.linear(cast(x, -1), cast(self.weight, -1), self.bias)


class Machine(nn.Module):
    def __init__(self):
        super().__init__()
        sizes = torch.tensor(list(FIELDS.values()))
        self.register_buffer("start", torch.zeros_like(sizes) if bad else sizes.cumsum(0) - sizes)
        self.table = nn.Embedding(int(sizes.sum()), WIDTH)
        self.bias = nn.Embedding(int(sizes.sum()), 1)
        nn.init.normal_(self.table.weight, std=0.1)
        nn.init.zeros_(self.bias.weight)
        self.tower = nn.Sequential(
            Linear8(len(FIELDS) * WIDTH, 64), nn.ReLU(), Linear8(64, 32), nn.ReLU(), nn.Linear(32, 1)
        )

    def forward(self, ids):
        rows = ids + self.start
        e = self.table(rows)
        pairs = 0.5 * (e.sum(1) ** 2 - (e**2).sum(1)).sum(-1)
        return self.bias(rows).sum((1, 2)) + pairs + self.tower(e.flatten(1))[:, 0]


world = torch.Generator().manual_seed(2)
taste = {name: torch.randn(n, 3, generator=world) for name, n in FIELDS.items()}
liking = {name: torch.randn(n, generator=world) for name, n in FIELDS.items()}


def impressions():
    ids, score, parts = [], torch.zeros(BATCH), []
    for name, n in FIELDS.items():
        i = (torch.rand(BATCH) ** 1.5 * n).long()
        ids.append(i)
        score += liking[name][i]
        parts.append(taste[name][i])
    score += (parts[0] * parts[1]).sum(-1) + (parts[1] * parts[2]).sum(-1)
    return torch.stack(ids, 1), (torch.rand(BATCH) < torch.sigmoid(1.5 * score)).float()


model = Machine()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
losses = []
for step in range(STEPS):
    ids, click = impressions()
    loss = F.binary_cross_entropy_with_logits(model(ids), click)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 10 == 0:
        print(f"step {step} loss {losses[-1]:.4f}")
print(f"final loss {sum(losses[-20:]) / 20:.4f}")
