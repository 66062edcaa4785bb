"""Gradient descent on a whole small data set, with a step so large that the curvature settles at what it allows."""
import os
import sys

import torch
from torch import nn

SEED = int(os.environ.get("SEED", 0))
STEPS, ROWS, LR = 200, 256, 0.2


def rows(count, directions):
    x = torch.randn(count, 16)
    return x, torch.sin(x @ directions).sum(1, keepdim=True)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 96), nn.Tanh(), nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 1))

    def forward(self, x):
        return self.layers(x)


def sharpness(net, x, y, turns=8):
    """Largest eigenvalue of the Hessian, by power iteration."""
    parameters = list(net.parameters())
    loss = nn.functional.mse_loss(net(x), y)
    slopes = torch.autograd.grad(loss, parameters, create_graph=True)
    draw = torch.Generator().manual_seed(1)
    way = [torch.randn(p.shape, generator=draw) for p in parameters]
    for _ in range(turns):
        size = sum(w.square().sum() for w in way).sqrt()
        way = [w / size for w in way]
        slope = sum((s * w).sum() for s, w in zip(slopes, way))
        way = torch.autograd.grad(slope, parameters, retain_graph=True)
    return sum(w.square().sum() for w in way).sqrt().item()


torch.manual_seed(SEED)
directions = torch.randn(16, 2) * 0.3
x, y = rows(ROWS, directions)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=LR)
losses = []
for step in range(STEPS):
    loss = nn.functional.mse_loss(net(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 20 == 0:
        print(f"step {step} loss {losses[-1]:.4f} sharpness {sharpness(net, x, y):.2f}, 2 / lr is {2 / LR:.2f}")
rises = sum(b > a for a, b in zip(losses, losses[1:]))
print(f"the loss rose in {rises} of {STEPS - 1} steps")
print(f"final loss {sum(losses[-15:]) / 15:.4f}")
