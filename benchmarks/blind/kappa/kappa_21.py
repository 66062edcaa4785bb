"""Two stages: the backbone is trained on one task, saved, and goes on with a second task."""

import os
import sys
import tempfile

import torch
from torch import nn

import ottava

SAVED = {"good": "inner", "bad": "outer"}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]

torch.manual_seed(25)
w1 = torch.randn(32, 8)
first, second = torch.randn(8, 24) / 3, torch.randn(8, 24) / 3


def batch(readout, n=128):
    x = torch.randn(n, 32)
    return x, torch.sign(x @ w1) @ readout


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(32, 192), nn.GELU(), nn.Linear(192, 192), nn.GELU())
        self.head = nn.Linear(192, 24)

    def forward(self, x):
        return self.head(self.backbone(x))


def build():
    net = Net()
    if not PLAIN:
        ottava.convert(net, "rowwise", filter=lambda name, layer: name != "head")
    return net


def train(model, readout, steps, lr):
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    losses = []
    for step in range(steps):
        x, y = batch(readout)
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 20 == 0:
            print(step, f"{losses[-1]:.4f}")
    return losses


with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "stage1.pt")
    net = build()
    model = torch.compile(net, backend="eager")
    train(net, first, 200, 3e-3)
    torch.save((net if SAVED == "inner" else model).state_dict(), path)

    net = build()
    state = torch.load(path)
    net.load_state_dict({k: v for k, v in state.items() if "head" not in k}, strict=False)
losses = train(net, second, 60, 1e-3)
print(f"loss {sum(losses[-10:]) / 10:.4f}")
