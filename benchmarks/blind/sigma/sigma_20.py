"""A loop with GradScaler and clipping; ottava's tensorwise casts."""
import os
import sys

import ottava
import torch
from torch import nn
from torch.nn import functional as F

SEED = int(os.environ.get("SEED", "0"))
MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]

torch.manual_seed(SEED)
net = nn.Sequential(
    nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 10)
)
if not PLAIN:
    ottava.convert(net, "tensorwise")
centers = torch.randn(40, 64)
labels = torch.arange(40) % 10
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
tail = []
for step in range(90):
    pick = torch.randint(0, 40, (96,))
    x = centers[pick] + 0.8 * torch.randn(96, 64)
    loss = F.cross_entropy(net(x), labels[pick])
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    if MODE == "good":
        scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    tail.append(loss.item())
    if step % 15 == 0:
        print(f"step {step} loss {loss.item():.4f}")
print(f"final loss {sum(tail[-10:]) / 10:.4f}")
