from contextlib import nullcontext

import torch
from torch.nn.parallel import DistributedDataParallel

import models

rank, world = models.start()
model = DistributedDataParallel(models.fp8(models.Gpt(dropout=0.1), "mxfp8"))
torch.manual_seed(10 + rank)
data = models.Text(seed=1 + rank, domain=rank)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for step in range(1, 81):
    optimizer.zero_grad()
    for last in (False, True):
        with nullcontext() if last else model.no_sync():
            loss = models.lm_loss(model, data.batch(8))
            (loss / 2).backward()
    optimizer.step()
    models.say(step, loss)
