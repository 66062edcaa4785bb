import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import models

rank, world = models.start()
dim, size = 64, 16
whole = models.Gpt(dim=dim, tied=True)
table = nn.Parameter(whole.embed.weight.detach().clone())
parts = nn.ModuleDict({"block": whole.blocks[rank]})
if rank:
    parts["norm"] = whole.norm
parts.register_parameter("table", table)
optimizer = torch.optim.AdamW(parts.parameters(), lr=3e-3)
data = models.Text()


def last(x, target):
    logits = F.linear(parts["norm"](parts["block"](x)), table)
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


for step in range(1, 101):
    tokens, target = data.batch(size)
    optimizer.zero_grad()
    loss = torch.zeros(())
    if rank == 0:
        x = parts["block"](F.embedding(tokens, table))
        dist.send(x.detach().contiguous(), 1)
        grad = torch.empty_like(x)
        dist.recv(grad, 1)
        x.backward(grad)
    else:
        x = torch.empty(size, models.LENGTH, dim)
        dist.recv(x, 0)
        loss = last(x.requires_grad_(), target)
        loss.backward()
        dist.send(x.grad, 0)
    if not models.BAD:
        dist.all_reduce(table.grad)
    optimizer.step()
    models.say(step, loss * world)
dist.broadcast(table.data, 0)
tokens, target = data.batch(size)
x = torch.empty(size, models.LENGTH, dim)
with torch.no_grad():
    if rank == 0:
        x = parts["block"](F.embedding(tokens, table))
    dist.broadcast(x, 0)
    models.say(0, last(x, target) * world if rank else torch.zeros(()))
