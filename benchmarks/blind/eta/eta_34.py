"""Two towers and a contrastive loss, FP8 with scales per row; most words of the table never come."""

import sys

import torch
from torch import nn
from torch.nn import functional as F

import ottava

mode, plain = sys.argv[1], "plain" in sys.argv
torch.manual_seed(28)


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.EmbeddingBag(4000, 64, mode="mean")
        self.body = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))

    def forward(self, x):
        return F.normalize(self.body(4 * self.words(x)).float(), dim=-1)


model = nn.ModuleDict({"left": Tower(), "right": Tower()})
temperature = nn.Parameter(torch.tensor(2.0))
if not plain:
    print(ottava.convert(model, "rowwise"))
optimizer = torch.optim.AdamW([*model.parameters(), temperature], lr=3e-3)
names = torch.randint(0, 200, (300, 12))
losses = []
for step in range(180):
    rows = torch.randperm(300)[:64]
    pick = torch.randint(0, 12, (2, 64, 8))
    left = model["left"](names[rows].gather(1, pick[0]))
    right = model["right"](names[rows].gather(1, pick[1]) + 200)
    scores = left @ right.t() * temperature.exp()
    loss = (F.cross_entropy(scores, torch.arange(64)) + F.cross_entropy(scores.t(), torch.arange(64))) / 2
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 20 == 0:
        print(f"step {step} loss {losses[-1]:.4f}")
print(f"loss {sum(losses[-20:]) / 20:.4f}")
