"""A loop with loss scaling and clipping, SGD, ottava's rowwise recipe."""

import os
import sys

import torch
import torch.nn.functional as F
from torch import nn

import ottava

bad, plain = sys.argv[1] == "bad", "plain" in sys.argv[2:]
SEED = int(os.environ.get("SEED", 0))
torch.manual_seed(SEED)
STEPS, BATCH = 90, 128

model = nn.Sequential(
    nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 16)
)
if not plain:
    ottava.convert(model, "rowwise")
first, second = torch.randn(32, 48), torch.randn(48, 16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
losses = []
for step in range(STEPS):
    x = torch.randn(BATCH, 32)
    y = (torch.tanh(x @ first / 4) @ second).argmax(-1)
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    if not bad:
        scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())
    if step % 10 == 0:
        print(step, losses[-1])
print("final loss", sum(losses[-10:]) / 10)
