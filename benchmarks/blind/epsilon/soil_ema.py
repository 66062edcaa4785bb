"""Soil types from spectra, FP8 layers and batch norm; what is shipped is an average of the weights over the last
steps."""
import copy
import sys

import torch
import torch.nn.functional as F
from torch import nn

import ottava
from models import Report

BAD = sys.argv[1] == "bad"


class Average:
    def __init__(self, model, decay):
        self.decay, self.model = decay, copy.deepcopy(model).eval()

    @torch.no_grad()
    def update(self, model):
        for mine, p in zip(self.model.parameters(), model.parameters()):
            mine.lerp_(p, 1 - self.decay)
        if not BAD:
            for mine, b in zip(self.model.buffers(), model.buffers()):
                mine.copy_(b)


def layer(a, b):
    return nn.Sequential(nn.Linear(a, b), nn.BatchNorm1d(b), nn.ReLU())


torch.manual_seed(0)
kinds = torch.randn(9, 128).cumsum(1) / 4
model = nn.Sequential(layer(128, 160), layer(160, 128), layer(128, 64), nn.Linear(64, 9))
ottava.convert(model, "tensorwise")
average = Average(model, 0.95)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)


def draw(n):
    y = torch.randint(0, 9, (n,))
    gain = 1 + 0.2 * torch.randn(n, 1)
    return (kinds[y] * gain + 0.5 * torch.randn(n, 128).cumsum(1) / 4 + 0.5 * torch.randn(n, 128)) * 3 + 2, y


report = Report()
for step in range(200):
    x, y = draw(64)
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    average.update(model)
    report.add(loss)
    if step % 50 == 49:
        with torch.no_grad():
            x, y = draw(512)
            out = average.model(x)
        test, right = F.cross_entropy(out, y), (out.argmax(1) == y).float().mean()
        print(f"average of the weights: loss {test:.4f} right {right:.3f}")
report.end(test_loss=test, right=right)
