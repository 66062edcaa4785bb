"""Sea level at a harbour as a function of the time and of 15 readings of the weather, by a network whose first
layer feeds sines."""
import sys

import torch
import torch.nn.functional as F
from torch import nn

import ottava
from models import Report

BAD = sys.argv[1] == "bad"


class Tides(nn.Module):
    def __init__(self, dim=128):
        super().__init__()
        self.clock = nn.Linear(16, dim)
        self.body = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, dim), nn.GELU())
        self.level = nn.Linear(dim, 1)
        with torch.no_grad():
            self.clock.weight[:, 0].normal_(std=40.0)
            self.clock.bias.uniform_(-3.1, 3.1)

    def forward(self, x):
        return self.level(self.body(torch.sin(self.clock(x))))


def choose(name, layer):
    return True if BAD else name.startswith("body")


torch.manual_seed(0)
model = Tides()
ottava.convert(model, "tensorwise", filter=choose)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
effect = torch.randn(15) / 20
report = Report()
for step in range(240):
    t, weather = torch.rand(256, 1), torch.randn(256, 15) / 4
    level = torch.sin(40 * t) + 0.5 * torch.sin(77 * t + 1) + 0.3 * torch.cos(23 * t)
    loss = F.mse_loss(model(torch.cat([t, weather], 1)), level + (weather @ effect)[:, None])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    report.add(loss)
report.end()
