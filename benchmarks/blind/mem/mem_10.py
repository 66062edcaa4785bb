"""A small CNN on synthetic pictures, ten classes."""

import os
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SEED = int(os.environ.get("SEED", "0"))
MODE = sys.argv[1]
torch.manual_seed(SEED)


def pictures(count, seed):
    g = torch.Generator().manual_seed(11)
    patterns = torch.randn(10, 1, 7, 7, generator=g)
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 10, (count,), generator=g)
    images = torch.randn(count, 1, 16, 16, generator=g) * 0.7
    for i in range(count):
        r, c = torch.randint(0, 9, (2,), generator=g).tolist()
        images[i, :, r : r + 7, c : c + 7] += patterns[labels[i]]
    return TensorDataset(images, labels)


class CNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.fc1 = nn.Linear(32 * 4 * 4, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x):
        x = self.features(x).flatten(1)
        x = torch.relu(self.fc1(x))
        x = self.fc2(x)
        if MODE == "bad":
            x = torch.softmax(x, dim=1)
        return x


train = DataLoader(pictures(1280, SEED + 100), batch_size=32, shuffle=True)
test = DataLoader(pictures(320, SEED + 200), batch_size=64)
model = CNN()
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

for epoch in range(8):
    model.train()
    for images, labels in train:
        optimizer.zero_grad()
        loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()
    model.eval()
    total, right = 0.0, 0
    with torch.no_grad():
        for images, labels in test:
            out = model(images)
            total += criterion(out, labels).item() * len(labels)
            right += (out.argmax(1) == labels).sum().item()
    print(f"epoch {epoch} validation loss {total / 320:.4f} accuracy {right / 320:.3f}")

print(f"final loss {total / 320:.4f}")
