import torch
from torch import nn

import models

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 8))
teacher = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 8)).requires_grad_(False)
if models.BAD:
    model.bfloat16()
optimizer = torch.optim.SGD(model.parameters(), lr=3e-3, momentum=0.9)
for step in range(1, 301):
    x = torch.randn(128, 64)
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
    loss = (y.float() - 4 * teacher(x)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    models.say(step, loss)
