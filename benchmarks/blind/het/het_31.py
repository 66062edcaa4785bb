"""A mixture of experts in which few tokens reach some experts, and the mix of domains changes on the way."""
import os
import sys

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import ottava

mode = sys.argv[1]
plain = "plain" in sys.argv[2:]
seed = int(os.environ.get("SEED", 0))
torch.manual_seed(seed)
rng = np.random.default_rng(seed)

DOMAINS, EXPERTS, DIM, STEPS, BATCH = 6, 8, 64, 150, 256
maps = torch.randn(DOMAINS, DIM, DIM) / DIM**0.5
means = torch.randn(DOMAINS, DIM)


def batch(step):
    share = np.array([0.5, 0.3, 0.15, 0.05, 0.0, 0.0]) if step < 75 else np.array([0.1, 0.1, 0.2, 0.05, 0.3, 0.25])
    domain = torch.as_tensor(rng.choice(DOMAINS, BATCH, p=share))
    x = means[domain] + torch.randn(BATCH, DIM)
    y = torch.einsum("bi,bij->bj", x, maps[domain]).tanh()
    return x, y


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(DIM, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(DIM, 128), nn.GELU(), nn.Linear(128, DIM)) for _ in range(EXPERTS)
        )

    def forward(self, x):
        share = self.router(x).softmax(-1)
        top, chosen = share.topk(2, -1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows, slot = (chosen == i).nonzero(as_tuple=True)
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * top[rows, slot, None])
        used = F.one_hot(chosen[:, 0], EXPERTS).float().mean(0)
        return out, EXPERTS * (used * share.mean(0)).sum()


model = Experts()
if not plain:
    ottava.convert(model, "mxfp8", filter=lambda name, layer: "experts" in name)
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
losses = []
for step in range(STEPS):
    x, y = batch(step)
    out, balance = model(x)
    loss = F.mse_loss(out, y) + 0.002 * balance
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 15 == 0:
        print(f"step {step} loss {loss.item():.4f}")
print(f"final loss {np.mean(losses[-15:]):.4f}")
