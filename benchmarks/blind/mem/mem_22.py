"""Tells birds' calls apart from few recordings: a 1-D CNN with dropout, validated after each epoch."""

import os
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SEED = int(os.environ.get("SEED", "0"))
bad = sys.argv[1] == "bad"
torch.manual_seed(SEED)


def calls(count, seed):
    g = torch.Generator().manual_seed(17)
    songs = torch.randn(6, 8, 24, generator=g)
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 6, (count,), generator=g)
    x = 10.0 + 6.0 * torch.randn(count, 8, 64, generator=g)
    for i in range(count):
        start = int(torch.randint(0, 40, (1,), generator=g))
        x[i, :, start : start + 24] += 4.8 * songs[y[i]]
    return TensorDataset(x, y)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv1d(8, 32, 5, padding=2), nn.BatchNorm1d(32)
        self.conv2, self.bn2 = nn.Conv1d(32, 64, 5, padding=2), nn.BatchNorm1d(64)
        self.drop = nn.Dropout(0.4)
        self.fc = nn.Linear(64 * 4, 6)

    def forward(self, x):
        x = nn.functional.max_pool1d(torch.relu(self.bn1(self.conv1(x))), 4)
        x = nn.functional.max_pool1d(torch.relu(self.bn2(self.conv2(x))), 4)
        return self.fc(self.drop(x.flatten(1)))


def validate(model, loader):
    model.eval()
    with torch.no_grad():
        losses = [nn.functional.cross_entropy(model(x), y) for x, y in loader]
    return torch.stack(losses).mean().item()


model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
train = DataLoader(calls(256, SEED + 1), batch_size=16, shuffle=True)
test = DataLoader(calls(256, SEED + 2), batch_size=64)
model.train()
print(f"before training: validation loss {validate(model, test):.4f}")
for epoch in range(20):
    if not bad:
        model.train()
    for x, y in train:
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    final = validate(model, test)
    print(f"epoch {epoch}: loss {loss.item():.4f}, validation loss {final:.4f}")

print(f"final loss {final:.4f}")
