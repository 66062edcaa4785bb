"""A classifier of sensor windows: layers under an FP8 recipe, SGD, a GradScaler and clipping, as copied from an older FP16 project."""

import sys

import torch
from torch import nn

import ottava

CONFIG = {"good": {"unscale_before_clip": True}, "bad": {"unscale_before_clip": False}}[sys.argv[1]]
torch.manual_seed(3)
centres = torch.randn(12, 96)


def batch(n=128):
    label = torch.randint(0, 12, (n,))
    return 0.6 * centres[label] + torch.randn(n, 96), label


model = nn.Sequential(nn.Linear(96, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 12))
if "plain" not in sys.argv:
    ottava.convert(model, "rowwise")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
losses = []
for step in range(100):
    x, y = batch()
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    if CONFIG["unscale_before_clip"]:
        scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())
    if step % 20 == 0:
        print(step, round(loss.item(), 4))
print(f"loss {sum(losses[-10:]) / 10:.4f}")
