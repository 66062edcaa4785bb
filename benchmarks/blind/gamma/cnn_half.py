"""A convolutional network under FP16 autocast with a GradScaler."""

import torch
import torch.nn.functional as F
from torch import nn

from models import shapes, start

bad = start()
g = torch.Generator().manual_seed(1)
model = nn.Sequential(
    nn.Conv2d(1, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU(),
    nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 4),
)  # fmt: skip
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
for step in range(120):
    image, label = shapes(32, g)
    with torch.autocast("cpu", torch.float16):
        loss = F.cross_entropy(model(image), label)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    if not bad:
        scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    print(step, round(loss.item(), 4))
