import math

import torch
import torch.nn.functional as F
from torch import nn

import models

torch.manual_seed(0)
maker = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
judge = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
first = torch.optim.Adam(maker.parameters(), lr=1e-3, betas=(0.5, 0.9))
second = torch.optim.Adam(judge.parameters(), lr=1e-3, betas=(0.5, 0.9))
for step in range(1, 301):
    angle = torch.randint(8, (128,)) * math.pi / 4
    real = 2 * torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(128, 2)
    fake = maker(torch.randn(128, 8))
    judged = F.softplus(-judge(real)).mean() + F.softplus(judge(fake.detach())).mean()
    second.zero_grad()
    judged.backward()
    second.step()
    made = F.softplus(-judge(fake)).mean()
    first.zero_grad()
    made.backward()
    first.step()
    models.say(step, judged)
