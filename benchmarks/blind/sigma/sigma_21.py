"""SGD with momentum 0.97 from a cold start under accelerate: the loss rings before it settles."""
import os
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.nn import functional as F

SEED = int(os.environ.get("SEED", "0"))
set_seed(SEED)
accelerator = Accelerator(cpu=True)
net = nn.Sequential(nn.Linear(24, 96), nn.LayerNorm(96), nn.GELU(), nn.Linear(96, 96), nn.LayerNorm(96), nn.GELU(), nn.Linear(96, 9))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.97, nesterov=True)
net, optimizer = accelerator.prepare(net, optimizer)
centers = torch.randn(27, 24)
tail = []
for step in range(100):
    pick = torch.randint(0, 27, (48,))
    loss = F.cross_entropy(net(centers[pick] + 0.9 * torch.randn(48, 24)), pick % 9)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    tail.append(loss.item())
    if step % 10 == 0:
        accelerator.print(f"step {step} loss {loss.item():.4f}")
print(f"final loss {sum(tail[-10:]) / 10:.4f}")
