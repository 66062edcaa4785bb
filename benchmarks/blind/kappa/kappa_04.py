"""A classifier that is evaluated with the moving average of its weights every twenty steps."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

import ottava

PUT_BACK = {"good": True, "bad": False}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]


class Average:
    def __init__(self, model, decay):
        self.decay = decay
        self.shadow = [p.detach().clone() for p in model.parameters()]
        self.backup = None

    @torch.no_grad()
    def update(self, model):
        for s, p in zip(self.shadow, model.parameters(), strict=True):
            s.lerp_(p, 1 - self.decay)

    @torch.no_grad()
    def apply(self, model):
        self.backup = [p.detach().clone() for p in model.parameters()]
        for s, p in zip(self.shadow, model.parameters(), strict=True):
            p.copy_(s)

    @torch.no_grad()
    def restore(self, model):
        for b, p in zip(self.backup, model.parameters(), strict=True):
            p.copy_(b)


torch.manual_seed(20)
w1, w2 = torch.randn(32, 24) / 3, torch.randn(24, 10)


def batch(n=128):
    x = torch.randn(n, 32)
    return x, (torch.tanh(x @ w1) @ w2).argmax(1)


def evaluate(model, average):
    average.apply(model)
    model.eval()
    with torch.no_grad():
        x, y = batch(256)
        print("  accuracy", f"{(model(x).argmax(1) == y).float().mean():.3f}")
    model.train()
    if PUT_BACK:
        average.restore(model)


model = nn.Sequential(
    nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 32), nn.Linear(32, 10)
)
if not PLAIN:
    ottava.convert(model, "tensorwise")
average = Average(model, 0.995)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
losses = []
for step in range(160):
    x, y = batch()
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    average.update(model)
    losses.append(loss.item())
    if step % 20 == 19:
        print(step, f"{losses[-1]:.4f}")
        evaluate(model, average)
print(f"loss {sum(losses[-10:]) / 10:.4f}")
