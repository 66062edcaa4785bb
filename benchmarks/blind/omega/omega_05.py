"""Pools big sets of cells with learned queries and tells the share of each kind of cell."""

import os
import sys

import torch
from torch import nn
from torch.nn import functional as F

bad = sys.argv[1] == "bad"
plain = "plain" in sys.argv
torch.manual_seed(int(os.environ.get("SEED", 0)))
torch.set_num_threads(1)

STEPS, BATCH, POINTS, WIDTH, KINDS = 120, 8, 2560, 32, 10


def fp8(x, scale):
    if plain:
        return x
    y = (x.detach() * scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() / scale
    return x + (y - x).detach()


def current(x):
    return 448.0 / x.detach().abs().amax().clamp(min=1e-12)


class Attention(nn.Module):
    """Few learned queries over many keys; both products take FP8 operands."""

    def __init__(self, queries=4):
        super().__init__()
        self.queries = nn.Parameter(torch.randn(queries, WIDTH) * 0.5)
        self.key = nn.Linear(WIDTH, WIDTH)
        self.value = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.queries, self.key(x), self.value(x)
        scores = fp8(q, current(q)) @ fp8(k, current(k)).transpose(1, 2) / WIDTH**0.5
        p = torch.softmax(scores, dim=-1)
        p = fp8(p, 1.0 if bad else 448.0)
        return (p @ fp8(v, current(v))).flatten(1)


class Cells(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Sequential(nn.Linear(3, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU())
        self.pool = Attention()
        self.head = nn.Sequential(nn.Linear(4 * WIDTH, 64), nn.GELU(), nn.Linear(64, KINDS))

    def forward(self, x):
        return self.head(self.pool(self.inp(x)))


centres = torch.randn(KINDS, 3, generator=torch.Generator().manual_seed(5)) * 1.5


def batch():
    share = torch.softmax(1.2 * torch.randn(BATCH, KINDS), -1)
    kind = torch.multinomial(share, POINTS, replacement=True)
    return centres[kind] + 0.4 * torch.randn(BATCH, POINTS, 3), share


model = Cells()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
losses = []
for step in range(STEPS):
    x, share = batch()
    loss = F.kl_div(torch.log_softmax(model(x), -1), share, reduction="batchmean")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 10 == 0:
        print(f"step {step} loss {losses[-1]:.4f}")
print(f"final loss {sum(losses[-15:]) / 15:.4f}")
