"""A small convolutional classifier of camera pictures in accelerate; its head's linears are ottava's."""

import os
import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import ottava

bad = sys.argv[1] == "bad"
plain = "plain" in sys.argv
seed = int(os.environ.get("SEED", 0))
torch.manual_seed(seed)
torch.set_num_threads(1)

BATCH, STEPS, SIDE, KINDS = 32, 120, 20, 6


class Pictures(Dataset):
    """Height x width x colour, as the camera writes them: a bar of one of three colours, upright or flat."""

    def __len__(self):
        return BATCH * STEPS

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(seed * 1_000_000 + i)
        kind = int(torch.randint(0, KINDS, (), generator=g))
        x = 0.6 * torch.randn(SIDE, SIDE, 3, generator=g)
        for colour in range(3):
            for _ in range(2):
                upright = kind // 3 if colour == kind % 3 else 1 - kind // 3
                at, start = torch.randint(0, SIDE - 1, (2,), generator=g).tolist()
                start = min(start, SIDE - 9)
                if upright:
                    x[start : start + 9, at, colour] += 1.6
                else:
                    x[at, start : start + 9, colour] += 1.6
        return x, kind


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 24, 5, padding=2), nn.BatchNorm2d(24), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(24, 48, 3, padding=1), nn.BatchNorm2d(48), nn.ReLU(), nn.AdaptiveMaxPool2d(2),
        )
        self.fc1 = nn.Linear(4 * 48, 96)
        self.fc2 = nn.Linear(96, KINDS)

    def forward(self, x):
        return self.fc2(F.relu(self.fc1(self.features(x).flatten(1))))


accelerator = Accelerator(cpu=True)
model = Classifier()
if not plain:
    ottava.convert(model, "tensorwise")
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=STEPS)
data = DataLoader(Pictures(), batch_size=BATCH)
model, optimizer, data, schedule = accelerator.prepare(model, optimizer, data, schedule)
losses = []
for step, (x, kind) in enumerate(data):
    if bad:
        x = x.reshape(-1, 3, SIDE, SIDE)
    else:
        x = x.permute(0, 3, 1, 2)
    loss = F.cross_entropy(model(x), kind)
    optimizer.zero_grad()
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    losses.append(loss.item())
    if step % 10 == 0:
        print(f"step {step} loss {losses[-1]:.4f}")
print(f"final loss {sum(losses[-10:]) / 10:.4f}")
