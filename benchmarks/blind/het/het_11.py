"""Matrix factorization whose item table is stored in 8 bits, with a scale for each row."""
import os
import sys

import numpy as np
import torch
from torch import nn

mode = sys.argv[1]
plain = "plain" in sys.argv[2:]
seed = int(os.environ.get("SEED", 0))
torch.manual_seed(seed)

USERS, ITEMS, DIM, STEPS, BATCH = 300, 120, 16, 200, 2048
true_u = torch.randn(USERS, 8)
true_v = torch.randn(ITEMS, 8) / 8**0.5
E4M3 = torch.float8_e4m3fn


def to_codes(rows):
    scale = rows.abs().amax(1, keepdim=True).clamp(min=1e-8) / 448
    scaled = rows / scale
    if mode == "good":
        step = torch.exp2(torch.floor(torch.log2(scaled.abs().clamp(min=2.0**-6))) - 3)
        scaled = torch.floor(scaled / step + torch.rand_like(scaled)) * step
    return scaled.clamp(-448, 448).to(E4M3), scale


class ItemTable(nn.Module):
    def __init__(self):
        super().__init__()
        start = torch.randn(ITEMS, DIM) * 0.5
        if plain:
            self.rows = start
        else:
            self.codes, self.scale = to_codes(start)

    def weight(self):
        return self.rows if plain else self.codes.float() * self.scale

    def write(self, rows):
        if plain:
            self.rows = rows
        else:
            self.codes, self.scale = to_codes(rows)


users = nn.Embedding(USERS, DIM)
nn.init.normal_(users.weight, std=0.6)
mix = nn.Linear(DIM, DIM)
items = ItemTable()
optimizer = torch.optim.Adam([*users.parameters(), *mix.parameters()], lr=2e-2)
LR_ITEMS = 2.0
losses = []
for step in range(STEPS):
    u = torch.randint(0, USERS, (BATCH,))
    v = torch.randint(0, ITEMS, (BATCH,))
    rating = (true_u[u] * true_v[v]).sum(1)
    table = items.weight().requires_grad_()
    guess = (mix(users(u)) * table[v]).sum(1)
    loss = (guess - rating).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        items.write(table - LR_ITEMS * table.grad)
    losses.append(loss.item())
    if step % 25 == 0:
        print(f"step {step} loss {loss.item():.4f}")
print(f"final loss {np.mean(losses[-15:]):.4f}")
