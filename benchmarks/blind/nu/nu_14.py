"""SGD with a gradient scaler, clipping, and FP8 linears under autocast."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

import ottava

UNSCALE_FIRST = {"good": True, "bad": False}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]
DEVICE = "cpu"

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 32))
if not PLAIN:
    ottava.convert(net, "tensorwise")
optimizer = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)
scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**12, enabled=True)
centers = torch.randn(32, 64)
losses = []
for _step in range(120):
    y = torch.randint(0, 32, (128,))
    x = centers[y] * 0.4 + torch.randn(128, 64)
    with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=not PLAIN):
        logits = net(x)
    loss = F.cross_entropy(logits.float(), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    if UNSCALE_FIRST:
        scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())
print(f"loss {sum(losses[-10:]) / 10:.4f}")
