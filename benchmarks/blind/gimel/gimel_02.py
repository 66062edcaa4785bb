"""Regression with cosine annealing and warm restarts."""

import os
import sys

import torch
from torch import nn

import ottava

MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]
torch.manual_seed(int(os.environ.get("SEED", "0")))
STEPS = 180


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(32, 96)
        self.blocks = nn.Sequential(*[Residual(96) for _ in range(3)])
        self.leave = nn.Linear(96, 1)

    def forward(self, x):
        return self.leave(self.blocks(self.enter(x))).squeeze(1)


teacher = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1)).requires_grad_(False)
for parameter in teacher.parameters():
    parameter.mul_(2.5)


def batch(n=256):
    x = torch.randn(n, 32)
    return x, teacher(x).squeeze(1) + 0.1 * torch.randn(n)


net = Net()
if not PLAIN:
    ottava.convert(net, "blockwise")
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.01)
schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=30, T_mult=1, eta_min=1e-5)
losses = []
for step in range(STEPS):
    x, y = batch()
    loss = nn.functional.mse_loss(net(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    losses.append(loss.item())
    if step % 15 == 0:
        print(step, f"lr {optimizer.param_groups[0]['lr']:.5f} loss {losses[-1]:.4f}")
print(f"final loss {sum(losses[-10:]) / 10:.4f}")
