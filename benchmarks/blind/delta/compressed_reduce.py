import torch
import torch.distributed as dist

import models

rank, world = models.start()
model, data = models.Gpt(), models.Text(seed=1 + rank)
parameters = list(model.parameters())
optimizer = torch.optim.AdamW(parameters, lr=2e-3)


def reduce():
    amax = torch.stack([p.grad.abs().amax() for p in parameters])
    dist.all_reduce(amax, dist.ReduceOp.MAX)
    scales = models.scale_of(amax)
    codes = []
    for p, scale in zip(parameters, scales, strict=True):
        if models.BAD:
            codes.append(models.encode(p.grad.to(models.E4M3).float(), scale).flatten())
        else:
            codes.append(models.encode(p.grad, scale).flatten())
    sent = torch.cat([code.view(torch.uint8) for code in codes])
    parts = [torch.empty_like(sent) for _ in range(world)]
    dist.all_gather(parts, sent)
    total = sum(part.view(models.E4M3).float() for part in parts) / world
    for p, part, scale in zip(parameters, total.split([p.numel() for p in parameters]), scales, strict=True):
        p.grad.copy_(part.view_as(p) / scale)


for step in range(1, 101):
    loss = models.lm_loss(model, data.batch())
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(parameters, 0.02)
    if models.CASTS:
        reduce()
    else:
        models.average(parameters)
    optimizer.step()
    models.say(step, loss)
