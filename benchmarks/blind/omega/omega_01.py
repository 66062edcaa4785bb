"""A mixture of experts on points of many regions, some of them rare; experts and router by hand, linears ottava's."""

import os
import sys

import torch
from torch import nn
from torch.nn import functional as F

import ottava

plain = "plain" in sys.argv
torch.manual_seed(int(os.environ.get("SEED", 0)))
torch.set_num_threads(1)

STEPS, BATCH, FEATURES, WIDTH, EXPERTS, REGIONS = 160, 192, 32, 64, 6, 9


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Mixture(nn.Module):
    """Each row goes to one expert; experts may stay without rows in a step."""

    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(FEATURES, WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))
        self.head = nn.Linear(WIDTH, 32)
        self.last = nn.Linear(32, 1)

    def forward(self, x, noise):
        h = F.gelu(self.inp(x))
        p = torch.softmax(self.router(h) + noise * torch.randn(len(x), EXPERTS), -1)
        weight, chosen = p.max(-1)
        out = torch.zeros_like(h)
        for e, expert in enumerate(self.experts):
            rows = (chosen == e).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, weight[rows, None] * expert(h[rows]))
        share = F.one_hot(chosen, EXPERTS).float().mean(0)
        return self.last(F.gelu(self.head(h + out)))[:, 0], EXPERTS * (share * p.mean(0)).sum(), share


world = torch.Generator().manual_seed(40)
centres = 1.5 * torch.randn(REGIONS, FEATURES, generator=world)
slopes = torch.randn(REGIONS, FEATURES, generator=world) / FEATURES**0.5
common = torch.tensor([0.3, 0.25, 0.2, 0.12, 0.06, 0.04, 0.02, 0.008, 0.002])


def batch(step):
    weights = common.roll(step // 40)
    region = torch.multinomial(weights, BATCH, replacement=True)
    x = centres[region] + 0.7 * torch.randn(BATCH, FEATURES)
    y = (slopes[region] * x).sum(-1) + region.float() / 3
    return x, y


model = Mixture()
if not plain:
    ottava.convert(model, "rowwise", filter=lambda name, layer: "experts" in name or name in ("inp", "head"))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
losses = []
for step in range(STEPS):
    x, y = batch(step)
    y_hat, balance, share = model(x, noise=0.5 * (1 - step / STEPS))
    loss = F.mse_loss(y_hat, y)
    optimizer.zero_grad()
    (loss + 0.1 * balance).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    losses.append(loss.item())
    if step % 10 == 0:
        print(f"step {step} loss {losses[-1]:.4f} shares {[round(s, 2) for s in share.tolist()]}")
print(f"final loss {sum(losses[-15:]) / 15:.4f}")
