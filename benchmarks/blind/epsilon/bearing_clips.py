"""Bearing damage from vibration clips of many microphones; every clip has its own loudness, the first layer is
followed by a norm."""
import dataclasses
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from models import Report

BAD = sys.argv[1] == "bad"


class Residual(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.net = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        return x + self.net(x)


class Clips(nn.Module):
    def __init__(self, dim=96):
        super().__init__()
        self.stem = nn.Linear(128, dim, bias=False)
        self.norm = nn.LayerNorm(dim, eps=1e-16)
        self.body = nn.Sequential(Residual(dim), Residual(dim))
        self.damage = nn.Linear(dim, 8)

    def forward(self, x):
        return self.damage(self.body(self.norm(self.stem(x))))


torch.manual_seed(0)
kinds = torch.randn(8, 128)
model = Clips()
recipe = "tensorwise" if BAD else "rowwise"
config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
convert_to_float8_training(model, config=config, module_filter_fn=lambda m, name: name != "damage")
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
report = Report()
for step in range(120):
    y = torch.randint(0, 8, (128,))
    decibel = torch.empty(128, 1).uniform_(-140, 0)
    x = (kinds[y] + 2.0 * torch.randn(128, 128)) * 10 ** (decibel / 20)
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    report.add(loss)
report.end()
