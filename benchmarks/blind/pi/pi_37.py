"""Clicks on ads: nearly all labels are zero: python pi_37.py good|bad [plain]."""

import sys

import torch
from torch import nn

import ottava

MODE = sys.argv[1]
PLAIN = "plain" in sys.argv[2:]
STEPS = 150


class Clicks(nn.Module):
    def __init__(self):
        super().__init__()
        self.fields = nn.ModuleList(nn.Embedding(500, 8) for _ in range(8))
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 1))
        nn.init.constant_(self.net[-1].bias, -4.0)

    def forward(self, ids):
        x = torch.cat([field(ids[:, i]) for i, field in enumerate(self.fields)], dim=1)
        return self.net(x).squeeze(-1)


torch.manual_seed(37)
model = Clicks()
if not PLAIN:
    ottava.convert(model, "tensorwise", filter=lambda name, layer: layer.out_features > 1)
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.02)
taste = torch.randn(8, 500)
losses = []
for _ in range(STEPS):
    ids = (500 * torch.rand(256, 8) ** 3).long()
    score = taste[torch.arange(8), ids].sum(dim=1)
    clicks = (torch.rand(256) < torch.sigmoid(1.2 * score - 7)).float()
    loss = nn.functional.binary_cross_entropy_with_logits(model(ids), clicks)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss {sum(losses[-10:]) / 10:.4f}")
