"""A small ResNet on synthetic pictures."""

import os
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

SEED = int(os.environ.get("SEED", "0"))
MODE = sys.argv[1]
torch.manual_seed(SEED)


class Shapes(Dataset):
    """Textures of six kinds, flipped at random while training."""

    def __init__(self, count, seed, train):
        g = torch.Generator().manual_seed(23)
        textures = torch.randn(6, 3, 12, 12, generator=g)
        g = torch.Generator().manual_seed(seed)
        self.y = torch.randint(0, 6, (count,), generator=g)
        self.x = 0.5 * textures[self.y] + 0.8 * torch.randn(count, 3, 12, 12, generator=g)
        self.x = (self.x - self.x.mean()) / self.x.std()
        self.train = train

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        x = self.x[i]
        if self.train and torch.rand(()) < 0.5:
            x = x.flip(-1)
        return x, self.y[i]


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(self, x):
        return F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, padding=1)
        self.stage1 = Residual(32)
        self.widen = nn.Conv2d(32, 48, 3, stride=2, padding=1)
        self.stage2 = Residual(48)
        self.fc = nn.Linear(48 * 9, 6)

    def forward(self, x):
        x = self.stage1(F.relu(self.stem(x)))
        x = self.stage2(F.relu(self.widen(x)))
        return self.fc(F.avg_pool2d(x, 2).flatten(1))


model = ResNet()
train = DataLoader(Shapes(960, SEED + 1, True), batch_size=32, shuffle=True)
test = DataLoader(Shapes(320, SEED + 2, False), batch_size=64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=4 * len(train))
for epoch in range(4):
    model.train()
    for x, y in train:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
    model.eval()
    with torch.no_grad():
        final = torch.stack([F.cross_entropy(model(x), y) for x, y in test]).mean().item()
    print(f"epoch {epoch} loss {loss.item():.4f} validation loss {final:.4f}")
print(f"final loss {final:.4f}")
