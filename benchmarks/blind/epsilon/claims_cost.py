"""Cost of insurance claims, a few of them enormous; torchao's FP8 training and clipped SGD."""
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from models import Report

BAD = sys.argv[1] == "bad"
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 1))
convert_to_float8_training(model, config=Float8LinearConfig(emulate=True), module_filter_fn=lambda m, name: name != "4")
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
slope, bend = torch.randn(64) / 8, torch.randn(64) / 8


def draw(n):
    x = torch.randn(n, 64)
    cost = torch.sin(2 * x @ slope) + (x @ bend).abs()
    huge = torch.rand(n) < 0.002
    return x, torch.where(huge, 300 * torch.randn(n).abs(), cost), huge


report = Report()
for step in range(250):
    x, cost, huge = draw(64)
    guess = model(x)[:, 0]
    loss = F.mse_loss(guess, cost)
    optimizer.zero_grad()
    loss.backward()
    if BAD:
        optimizer.step()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    else:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    report.add((guess - cost)[~huge].square().mean().detach())
report.end()
