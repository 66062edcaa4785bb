"""A small CNN on textures under cosine restarts with a large learning rate."""
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

CLASSES, SIDE, STEPS, BATCH = 6, 16, 160, 64
angles = torch.arange(CLASSES) * torch.pi / CLASSES
axis = torch.linspace(-1, 1, SIDE)
yy, xx = torch.meshgrid(axis, axis, indexing="ij")


def batch():
    labels = torch.randint(0, CLASSES, (BATCH,))
    a = angles[labels][:, None, None]
    phase = torch.rand(BATCH, 1, 1) * 6.28
    images = torch.sin(9 * (torch.cos(a) * xx + torch.sin(a) * yy) + phase) + 0.9 * torch.randn(BATCH, SIDE, SIDE)
    return images[:, None], labels


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 16, 5, 2, 2), nn.BatchNorm2d(16), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(16, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU())
        self.fc1 = nn.Linear(32 * 16, 128)
        self.fc2 = nn.Linear(128, 64)
        self.head = nn.Linear(64, CLASSES)

    def forward(self, x):
        x = self.body(self.stem(x)).flatten(1)
        return self.head(F.relu(self.fc2(F.relu(self.fc1(x)))))


model = Net()
if not plain:
    ottava.convert(model, "delayed")
optimizer = torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.9, nesterov=True, weight_decay=1e-4)
schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=40)
losses = []
for step in range(STEPS):
    images, labels = batch()
    loss = F.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    losses.append(loss.item())
    if step % 10 == 0:
        print(f"step {step} lr {schedule.get_last_lr()[0]:.3f} loss {loss.item():.4f}")
print(f"final loss {np.mean(losses[-10:]):.4f}")
