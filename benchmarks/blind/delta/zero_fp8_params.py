import torch
import torch.distributed as dist

import models

rank, world = models.start()
model, data = models.Gpt(), models.Text(seed=1 + rank)
named = list(enumerate(model.parameters()))
masters = {i: p.detach().clone().requires_grad_() for i, p in named if i % world == rank}
optimizer = torch.optim.AdamW(masters.values(), lr=2e-3, weight_decay=0.0)


@torch.no_grad()
def publish(i, p):
    owner = i % world
    value = masters[i].detach().clone() if owner == rank else torch.empty_like(p)
    if models.CASTS and p.ndim == 2:
        scale = models.scale_of(value.abs().amax()).reshape(1)
        code = models.encode(value, scale).view(torch.uint8).contiguous()
        dist.broadcast(scale, owner)
        dist.broadcast(code, owner)
        value = code.view(models.E4M3).float() / scale
    else:
        dist.broadcast(value, owner)
    p.copy_(value)
    if models.BAD and owner == rank:
        masters[i].copy_(p)


for step in range(1, 81):
    loss = models.lm_loss(model, data.batch())
    model.zero_grad()
    loss.backward()
    models.average(model.parameters())
    for i, master in masters.items():
        master.grad = named[i][1].grad
    optimizer.step()
    for i, p in named:
        publish(i, p)
    models.say(step, loss)
