"""Raw pixels from 0 to 255 go into a network whose first layer normalizes; three micro-batches a step."""

import torch
import torch.nn.functional as F
from torch import nn

from models import shapes

torch.manual_seed(0)
g = torch.Generator().manual_seed(1)
model = nn.Sequential(
    nn.BatchNorm2d(1), nn.Conv2d(1, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(),
    nn.Flatten(), nn.Dropout(0.4), nn.Linear(512, 4),
)  # fmt: skip
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
for step in range(100):
    optimizer.zero_grad()
    for _ in range(3):
        image, label = shapes(16, g)
        loss = F.cross_entropy(model((image * 60 + 90).clamp(0, 255).round()), label)
        (loss / 3).backward()
    optimizer.step()
    print(step, round(loss.item(), 4))
