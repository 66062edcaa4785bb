"""Classifies spectra; every epoch each spectrum is shifted a little up or down and gets fresh noise."""

import os
import sys

import torch
from torch import nn
from torch.nn import functional as F

import ottava

bad = sys.argv[1] == "bad"
plain = "plain" in sys.argv
torch.manual_seed(int(os.environ.get("SEED", 0)))
torch.set_num_threads(1)

EPOCHS, COUNT, BATCH, BINS, CLASSES = 20, 480, 48, 96, 8

world = torch.Generator().manual_seed(31)
lines = torch.randn(CLASSES, BINS, generator=world) * 0.45


def measure(n):
    y = torch.randint(0, CLASSES, (n,))
    gain = 0.7 + 0.6 * torch.rand(n, 1)
    return gain * lines[y] + 0.9 * torch.randn(n, BINS), y


class Spectra:
    """All spectra in one tensor; `get` hands out a batch with its augmentation."""

    def __init__(self, n):
        self.x, self.y = measure(n)

    def get(self, start):
        x, y = self.x[start : start + BATCH], self.y[start : start + BATCH]
        if not bad:
            x = x.clone()
        x += 0.35 * torch.randn(len(x), 1)
        x += 0.6 * torch.randn_like(x)
        return x, y


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(1, 8, 5, padding=2)
        self.fc1 = nn.Linear(8 * BINS // 2, 64)
        self.fc2 = nn.Linear(64, 64)
        self.out = nn.Linear(64, CLASSES)

    def forward(self, x):
        h = F.max_pool1d(F.relu(self.conv(x[:, None])), 2).flatten(1)
        h = F.relu(self.fc1(h))
        return self.out(h + F.relu(self.fc2(h)))


data = Spectra(COUNT)
model = Network()
if not plain:
    ottava.convert(model, "blockwise")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
losses = []
for epoch in range(EPOCHS):
    for start in torch.randperm(COUNT // BATCH).tolist():
        x, y = data.get(start * BATCH)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"epoch {epoch} loss {sum(losses[-COUNT // BATCH :]) / (COUNT // BATCH):.4f}")
print(f"final loss {sum(losses[-COUNT // BATCH :]) / (COUNT // BATCH):.4f}")
