"""Rare clicks: three in a hundred labels are one; hashed categories and a few dense features."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

import ottava

MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]


class Clicks(nn.Module):
    def __init__(self, fields=6, buckets=200, dim=16):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(buckets, dim) for _ in range(fields))
        self.mlp = nn.Sequential(nn.Linear(fields * dim + 32, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU())
        self.out = nn.Linear(64, 1)
        nn.init.constant_(self.out.bias, -3.4)

    def forward(self, category, dense):
        parts = [table(category[:, i]) for i, table in enumerate(self.tables)]
        return self.out(self.mlp(torch.cat([*parts, dense], 1)))[:, 0]


torch.manual_seed(71)
weights = torch.randn(6, 200) * 0.9
model = Clicks()
if not PLAIN:
    ottava.convert(model, "tensorwise")
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.02)
losses = []
for _ in range(180):
    category = (200 * torch.rand(192, 6) ** 3).long()
    dense = torch.randn(192, 32)
    score = sum(weights[i, category[:, i]] for i in range(6)) + dense[:, 0] - 5.5
    clicked = (torch.rand(192) < score.sigmoid()).float()
    loss = F.binary_cross_entropy_with_logits(model(category, dense).float(), clicked)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss {sum(losses[-10:]) / 10:.4f}")
