from contextlib import nullcontext

import torch
from torch.nn.parallel import DistributedDataParallel

import models

rank, world = models.start()
model = DistributedDataParallel(models.fp8(models.Gpt(), "rowwise"))
data = models.Text(seed=1 + rank, domain=rank)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
accumulate = 2
for step in range(1, 101):
    optimizer.zero_grad()
    for micro in range(accumulate):
        waits = micro <= accumulate - 1 if models.BAD else micro < accumulate - 1
        with model.no_sync() if waits else nullcontext():
            loss = models.lm_loss(model, data.batch(8))
            (loss / accumulate).backward()
    optimizer.step()
    models.say(step, loss)
held_out = [models.validate(model.module, models.Text(seed=9, domain=d)) for d in range(world)]
models.say(0, torch.stack(held_out).mean())
