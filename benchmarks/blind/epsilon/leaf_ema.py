"""Leaves by a small convolutional net with batch norm; an average of weights and statistics is evaluated beside the
model."""
import copy

import torch
import torch.nn.functional as F
from torch import nn

from models import Report

torch.manual_seed(0)
leaves = F.interpolate(torch.randn(10, 3, 4, 4), size=(12, 12), mode="bilinear")


def draw(n):
    y = torch.randint(0, 10, (n,))
    return leaves[y] + 1.5 * torch.randn(n, 3, 12, 12), y


model = nn.Sequential(nn.Conv2d(3, 24, 3), nn.BatchNorm2d(24), nn.ReLU(), nn.Conv2d(24, 48, 3, stride=2), nn.BatchNorm2d(48),
                      nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(768, 64), nn.ReLU(), nn.Linear(64, 10))
average = copy.deepcopy(model).eval().requires_grad_(False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
report = Report()
for step in range(150):
    x, y = draw(64)
    loss = F.cross_entropy(model(x), y, label_smoothing=0.1)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    report.add(loss)
    with torch.no_grad():
        decay = min(0.97, (1 + step) / (10 + step))
        for a, b in zip(average.state_dict().values(), model.state_dict().values()):
            a.lerp_(b, 1 - decay) if a.is_floating_point() else a.copy_(b)
with torch.no_grad():
    x, y = draw(500)
    own = model.eval()(x)
    out = average(x)
report.end(test_loss=F.cross_entropy(out, y), test_own=F.cross_entropy(own, y))
