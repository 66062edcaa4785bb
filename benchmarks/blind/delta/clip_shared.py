import torch

import models

rank, world = models.start()
model, data = models.fp8(models.Gpt(), "mxfp8"), models.Text(seed=1 + rank)
optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
for step in range(1, 101):
    loss = models.lm_loss(model, data.batch())
    optimizer.zero_grad()
    loss.backward()
    models.average(model.parameters())
    if rank == 0 or not models.BAD:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2)
    optimizer.step()
    models.say(step, loss)
