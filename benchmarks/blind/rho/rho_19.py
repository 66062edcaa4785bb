"""SGD with Nesterov's momentum of 0.95 from a cold start, no warm-up: the loss rises before it falls."""
import os
import sys

import torch
from torch import nn
from torch.nn import functional as F

SEED = int(os.environ.get("SEED", 0))
torch.manual_seed(SEED)
centres = torch.randn(20, 48)
model = nn.Sequential(nn.Linear(48, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 20))
optimizer = torch.optim.SGD(model.parameters(), lr=0.08, momentum=0.95, nesterov=True)
losses = []
for step in range(90):
    y = torch.randint(0, 20, (48,))
    x = centres[y] + 1.6 * torch.randn(48, 48)
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"final loss {sum(losses[-10:]) / 10:.4f}")
