"""Whole-batch gradient descent with a step near the edge of stability: the loss hops down."""

import os

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(int(os.environ.get("SEED", 0)))
torch.set_num_threads(1)

STEPS, COUNT, FEATURES, CLASSES, RATE = 200, 600, 20, 5, 2.0

world = torch.Generator().manual_seed(3)
first = torch.randn(FEATURES, 24, generator=world) / FEATURES**0.5
second = torch.randn(24, CLASSES, generator=world)


def measure(n):
    x = torch.randn(n, FEATURES)
    return x, (torch.tanh(2 * x @ first) @ second + 0.2 * torch.randn(n, CLASSES)).argmax(-1)


x, y = measure(COUNT)
held_x, held_y = measure(COUNT)

model = nn.Sequential(
    nn.Linear(FEATURES, 100),
    nn.Tanh(),
    nn.Linear(100, 100),
    nn.Tanh(),
    nn.Linear(100, CLASSES),
)
optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
losses = []
for step in range(STEPS):
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 10 == 0:
        print(f"step {step} loss {losses[-1]:.4f}")
with torch.no_grad():
    right = (model(held_x).argmax(-1) == held_y).float().mean()
rises = sum(b > a for a, b in zip(losses, losses[1:]))
print(f"the loss rose in {rises} of {STEPS} steps; right on new rows: {right:.3f}")
print(f"final loss {sum(losses[-20:]) / 20:.4f}")
