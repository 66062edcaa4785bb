"""Epochs over tensors in memory, reshuffled in place before each one."""
import sys

import torch
from torch import nn

MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]
SHUFFLED = {"good": ("x", "y", "weight"), "bad": ("x", "weight")}[MODE]
torch.manual_seed(59)
width, classes, n, size = 128, 16, 2560, 64
centres = torch.randn(classes, 64)
y = torch.randint(classes, (n,))
store = {"x": centres[y] + 2 * torch.randn(n, 64), "y": y, "weight": torch.rand(n) + 0.5}
model = nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, classes))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
losses = []
for epoch in range(4):
    if epoch:
        order = torch.randperm(n)
        for name in SHUFFLED:
            store[name] = store[name][order]
    for at in range(0, n, size):
        x, y, weight = (store[name][at : at + size] for name in ("x", "y", "weight"))
        loss = (nn.functional.cross_entropy(model(x), y, reduction="none") * weight).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
print(f"first {losses[0]:.4f}")
print(f"loss {sum(losses[-10:]) / 10:.4f}")
