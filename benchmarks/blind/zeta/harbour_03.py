"""Trains in two sittings: a job of 150 steps, saved, then a second job that goes on from the file."""
import io
import sys

import torch
from torch import nn
from torch.nn import functional as F

import ottava

VARIANT, PLAIN = sys.argv[1], "plain" in sys.argv
torch.manual_seed(17)
waves = torch.randn(2, 32) * 2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 128), nn.SiLU())
        self.head = nn.Linear(128, 32)

    def forward(self, x):
        return self.head(self.body(x))


class Wrapped(nn.Module):
    """As torch.compile and DDP name things."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args):
        return self.module(*args)


def build():
    net = Net()
    if not PLAIN:
        ottava.convert(net, "blockwise")
    return net, torch.optim.AdamW(net.parameters(), lr=2e-3)


def job(net, optimizer, steps, losses):
    for _ in range(steps):
        p = torch.rand(64, 2) * 2 - 1
        x = torch.cat([(p @ waves).sin(), (p @ waves).cos()], 1)
        bins = ((p.norm(dim=1) * 11 + p[:, 0] * 9) % 32).long()
        loss = F.cross_entropy(net(x), bins)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())


losses, file = [], io.BytesIO()
net, optimizer = build()
wrapped = Wrapped(net)
job(wrapped, optimizer, 180, losses)
torch.save({"model": wrapped.state_dict(), "optimizer": optimizer.state_dict(), "step": 180}, file)

file.seek(0)
kept = torch.load(file)
net, optimizer = build()
state = kept["model"]
if VARIANT == "good":
    state = {name.removeprefix("module."): value for name, value in state.items()}
net.load_state_dict(state, strict=False)
optimizer.load_state_dict(kept["optimizer"])
job(net, optimizer, 100, losses)
print(f"loss {sum(losses[-20:]) / 20:.4f}")
