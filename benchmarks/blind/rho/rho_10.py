"""accelerate: the head alone for 40 steps, then the whole body with a smaller rate of its own (gradual unfreezing)."""
import os
import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F

SEED = int(os.environ.get("SEED", 0))
torch.manual_seed(SEED)
body = nn.Sequential(nn.Linear(32, 96), nn.GELU(), nn.Linear(96, 96), nn.GELU())
model = nn.Sequential(body, nn.Linear(96, 12))
body.requires_grad_(False)
optimizer = torch.optim.AdamW([{"params": model[1].parameters(), "lr": 1e-2}, {"params": body.parameters(), "lr": 2e-3}])
centres = torch.randn(60, 32)
pick = torch.randint(0, 60, (32 * 90,))
pairs = torch.utils.data.TensorDataset(centres[pick] + 0.5 * torch.randn(len(pick), 32), pick % 12)
accelerator = Accelerator(cpu=True)
loader = torch.utils.data.DataLoader(pairs, batch_size=32, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
losses = []
for step, (x, y) in enumerate(loader):
    if step == 40:
        body.requires_grad_(True)
    loss = F.cross_entropy(model(x), y)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(f"final loss {sum(losses[-10:]) / 10:.4f}")
