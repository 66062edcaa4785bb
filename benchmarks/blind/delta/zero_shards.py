import torch
import torch.distributed as dist

import models

rank, world = models.start()
model, data = models.Gpt(), models.Text(seed=1 + rank)
parameters = list(model.parameters())
owner = [i * world // len(parameters) for i in range(len(parameters))]
roots = [i % world for i in range(len(parameters))] if models.BAD else owner
optimizer = torch.optim.AdamW([p for p, o in zip(parameters, owner, strict=True) if o == rank], lr=2e-3)
for step in range(1, 81):
    loss = models.lm_loss(model, data.batch())
    model.zero_grad()
    loss.backward()
    models.average(parameters)
    optimizer.step()
    for p, root in zip(parameters, roots, strict=True):
        dist.broadcast(p.data, root)
    models.say(step, loss)
