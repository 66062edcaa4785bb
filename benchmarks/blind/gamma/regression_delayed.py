"""A residual network without norms fits a surface with large values; delayed scaling."""

import functools

import torch
import torch.nn.functional as F
from torch import nn

from models import DelayedLinear, start

bad = start()
linear = functools.partial(DelayedLinear, record_steps=8 if bad else None)


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = linear(width, 2 * width), linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.relu(self.up(x)))


model = nn.Sequential(nn.Linear(8, 64), Residual(64), Residual(64), Residual(64), linear(64, 1))
nn.init.normal_(model[4].weight, std=0.01)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min(1.0, (i + 1) / 30))
a = torch.randn(8, 3)
for step in range(250):
    x = torch.randn(256, 8)
    y = 60 * (torch.sin(x @ a).sum(1, keepdim=True) + 0.5 * (x @ a).prod(1, keepdim=True).clamp(-4, 4) + 2)
    loss = F.smooth_l1_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    print(step, round(loss.item(), 4))
