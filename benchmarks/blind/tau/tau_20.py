"""SGD with a momentum of 0.98 that takes its time to build up, on mixed-up images with soft labels and heavy dropout."""
import os
import sys

import torch
import torch.nn.functional as F
from torch import nn

PLAIN, SEED = "plain" in sys.argv, int(os.environ.get("SEED", 0))
torch.manual_seed(SEED)
model = nn.Sequential(nn.Conv2d(1, 12, 3, stride=2, padding=1), nn.BatchNorm2d(12), nn.ReLU(), nn.Conv2d(12, 24, 3, stride=2, padding=1),
                      nn.BatchNorm2d(24), nn.ReLU(), nn.Flatten(), nn.Dropout(0.5), nn.Linear(24 * 9, 64), nn.ReLU(), nn.Dropout(0.4), nn.Linear(64, 10))
pattern = torch.randn(10, 1, 12, 12, generator=torch.Generator().manual_seed(41))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.98)
losses = []
for step in range(100):
    y = torch.randint(10, (48,))
    x = pattern[y] + torch.randn(48, 1, 12, 12)
    lam, other = torch.distributions.Beta(0.4, 0.4).sample(), torch.randperm(48)
    soft = lam * F.one_hot(y, 10) + (1 - lam) * F.one_hot(y[other], 10)
    loss = F.cross_entropy(model(lam * x + (1 - lam) * x[other]), soft.float(), label_smoothing=0.05)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.4f}")
print(f"final loss {sum(losses[-10:]) / 10:.4f}")
