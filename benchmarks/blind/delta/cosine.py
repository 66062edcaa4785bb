import math

import torch

import models

torch.manual_seed(0)
steps, warmup, accumulate = 120, 10, 4


def factor(step):
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * min(1, (step - warmup) / (steps - warmup))))


model, data = models.fp8(models.Gpt(), "blockwise"), models.Text()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
for step in range(1, steps + 1):
    optimizer.zero_grad()
    for _ in range(accumulate):
        loss = models.lm_loss(model, data.batch(4))
        (loss / accumulate).backward()
        if models.BAD:
            scheduler.step()
    optimizer.step()
    if not models.BAD:
        scheduler.step()
    models.say(step, loss)
