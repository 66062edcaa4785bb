import torch
import torch.distributed as dist
from torch import nn

import models

rank, world = models.start()
model, data = models.Gpt(), models.Text(seed=1 + rank)
nn.init.normal_(model.embed.weight)
parameters = list(model.parameters())
flat = torch.cat([p.detach().flatten() for p in parameters])
size = -(-len(flat) // world)
flat = nn.functional.pad(flat, (0, size * world - len(flat)))
master = flat[rank * size : (rank + 1) * size].clone().requires_grad_()
optimizer = torch.optim.AdamW([master], lr=2e-3, weight_decay=0.0)


def gather():
    own = master.detach()
    if not models.CASTS:
        parts = [torch.empty_like(own) for _ in range(world)]
        dist.all_gather(parts, own)
        return torch.cat(parts)
    scale = models.scale_of(own.abs().amax()).reshape(1)
    scales = [torch.empty(1) for _ in range(world)]
    codes = [torch.empty(size, dtype=torch.uint8) for _ in range(world)]
    dist.all_gather(codes, models.encode(own, scale).view(torch.uint8))
    dist.all_gather(scales, scale)
    if models.BAD:
        scales = [scale] * world
    return torch.cat([code.view(models.E4M3).float() / s for code, s in zip(codes, scales, strict=True)])


for step in range(1, 91):
    torch.nn.utils.vector_to_parameters(gather()[: sum(p.numel() for p in parameters)], parameters)
    loss = models.lm_loss(model, data.batch())
    model.zero_grad()
    loss.backward()
    models.average(parameters)
    grad = torch.cat([p.grad.flatten() for p in parameters])
    master.grad = nn.functional.pad(grad, (0, size * world - len(grad)))[rank * size : (rank + 1) * size]
    optimizer.step()
    models.say(step, loss)
