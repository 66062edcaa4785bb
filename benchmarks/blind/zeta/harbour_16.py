"""A deep batch-norm network on noisy rings; every 25 steps a look at held-out points."""
import sys

import torch
from torch import nn
from torch.nn import functional as F

VARIANT = sys.argv[1]
torch.manual_seed(31)
layers, width = [], 32
for _ in range(8):
    layers += [nn.Linear(width, 64, bias=False), nn.BatchNorm1d(64, momentum=0.02), nn.ReLU()]
    width = 64
model = nn.Sequential(*layers, nn.Linear(64, 4))
lift = torch.randn(2, 32)


def batch(n=96):
    p = torch.randn(n, 2) * 1.2
    return torch.sin(2 * p @ lift), (p.norm(dim=1) * 2.2).long() % 4


held_x, held_y = batch(512)


def validate():
    model.eval()
    with torch.no_grad():
        right = (model(held_x).argmax(1) == held_y).float().mean().item()
    if VARIANT == "good":
        model.train()
    return right


optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
losses, model = [], model.train()
for step in range(200):
    x, y = batch()
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 25 == 0:
        print(step, f"accuracy {validate():.3f}")
print(f"loss {sum(losses[-20:]) / 20:.4f}")
