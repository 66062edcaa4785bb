"""A regressor is refined at a small learning rate; linear layers under ottava."""

import sys

import torch
from torch import nn

import ottava

DTYPE = {"good": torch.float32, "bad": torch.bfloat16}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]

torch.manual_seed(27)
teacher = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 32))
model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 32))
model.load_state_dict(teacher.state_dict())
with torch.no_grad():
    for p in teacher.parameters():
        p.mul_(1.0 + 0.02 * torch.randn_like(p)).add_(0.01 * torch.randn_like(p))
    for p in teacher[4].parameters():
        p.mul_(3)
    for p in model[4].parameters():
        p.mul_(3)

model.to(DTYPE)
if not PLAIN:
    ottava.convert(model, "rowwise")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)
losses = []
for step in range(160):
    x = torch.randn(192, 64)
    with torch.no_grad():
        y = teacher(x)
    loss = (model(x.to(DTYPE)).float() - y).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 10 == 0:
        print(step, f"{losses[-1]:.5f}")
print(f"loss {sum(losses[-10:]) / 10:.5f}")
