import torch
import torch.distributed as dist

import models

rank, world = models.start()
model, data = models.Gpt(), models.Text(seed=1 + rank)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
accumulate = 4


def reduce():
    flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    dist.all_reduce(flat)
    torch.nn.utils.vector_to_parameters(flat, [p.grad for p in model.parameters()])


for step in range(1, 81):
    optimizer.zero_grad()
    for micro in range(accumulate):
        loss = models.lm_loss(model, data.batch(8))
        (loss / accumulate / world).backward()
        if models.BAD or micro == accumulate - 1:
            reduce()
    optimizer.step()
    models.say(step, loss)
