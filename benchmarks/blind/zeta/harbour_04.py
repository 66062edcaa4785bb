"""A decoder from scratch on bracket strings, own initialization, float8 everywhere but the head."""
import sys

import torch
from torch import nn
from torch.nn import functional as F

import ottava

VARIANT, PLAIN = sys.argv[1], "plain" in sys.argv
torch.manual_seed(47)
D, LONG = 64, 32
SPREAD = {"good": 0.05, "bad": 0.9}[VARIANT]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.RMSNorm(D), nn.RMSNorm(D)
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, h):
        q, k, v = self.qkv(self.n1(h)).unflatten(-1, (12, 16)).transpose(1, 2).chunk(3, 1)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + self.out(a.transpose(1, 2).flatten(2))
        return h + self.down(F.gelu(self.up(self.n2(h))))


class Brackets(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.place = nn.Embedding(6, D), nn.Embedding(LONG, D)
        self.blocks = nn.Sequential(Block(), Block(), Block())
        self.head = nn.Linear(D, 6, bias=False)
        for p in self.parameters():
            if p.ndim > 1:
                nn.init.normal_(p, std=SPREAD)

    def forward(self, x):
        return self.head(self.blocks(self.token(x) + self.place.weight))


def strings(n=12):
    rows = []
    for _ in range(n):
        stack, row = [], []
        while len(row) < LONG + 1:
            if stack and torch.rand(()) < 0.5:
                row.append(stack.pop() + 3)
            else:
                stack.append(int(torch.randint(0, 3, ())))
                row.append(stack[-1])
        rows.append(row)
    return torch.tensor(rows)


model = Brackets()
if not PLAIN:
    print(ottava.convert(model, "tensorwise"))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
losses = []
for step in range(220):
    rows = strings()
    loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    losses.append(loss.item())
print(f"loss {sum(losses[-20:]) / 20:.4f}")
