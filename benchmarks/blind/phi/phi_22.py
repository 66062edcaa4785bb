"""A switch Transformer's layer: experts wake up one after another. ottava, tensorwise."""

import os
import sys

import torch
import torch.nn.functional as F
from torch import nn

import ottava

plain = "plain" in sys.argv[2:]
SEED = int(os.environ.get("SEED", 0))
torch.manual_seed(SEED)
WIDTH, EXPERTS, BATCH, STEPS, KINDS = 64, 6, 256, 100, 6


class Switch(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 96), nn.ReLU(), nn.Linear(96, WIDTH)) for _ in range(EXPERTS)
        )

    def forward(self, x):
        noisy = x * torch.empty_like(x).uniform_(0.9, 1.1) if self.training else x
        odds = self.router(noisy).softmax(-1)
        weight, chosen = odds.max(-1)
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows = (chosen == i).nonzero().squeeze(-1)
            if len(rows):
                y = y.index_add(0, rows, expert(x[rows]) * weight[rows, None])
        share = F.one_hot(chosen, EXPERTS).float().mean(0)
        return y, EXPERTS * (share * odds.mean(0)).sum()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.moe = nn.Linear(24, WIDTH), nn.LayerNorm(WIDTH), Switch()
        self.last, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, x):
        h = self.embed(x)
        y, balance = self.moe(self.norm(h))
        return self.head(self.last(h + y)), balance


centres = 2 * torch.randn(KINDS, 24)
maps = [nn.Sequential(nn.Linear(24, 20), nn.Tanh(), nn.Linear(20, 10)) for _ in range(KINDS)]
for one in maps:
    nn.init.normal_(one[0].weight)
    nn.init.normal_(one[2].weight)
model = Net()
with torch.no_grad():
    model.moe.router.weight.mul_(3)
if not plain:
    ottava.convert(model, "tensorwise")
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
odds = torch.tensor([0.4, 0.25, 0.15, 0.1, 0.06, 0.04])
losses = []
for step in range(STEPS):
    kind = torch.multinomial(odds, BATCH, replacement=True)
    noise = torch.randn(BATCH, 24)
    x = centres[kind] + noise
    with torch.no_grad():
        y = torch.stack([m(noise) for m in maps])[kind, torch.arange(BATCH)].argmax(-1)
    logits, balance = model(x)
    loss = F.cross_entropy(logits, y) + 0.01 * balance
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    losses.append(loss.item())
    if step % 10 == 0:
        print(step, losses[-1])
print("final loss", sum(losses[-10:]) / 10)
