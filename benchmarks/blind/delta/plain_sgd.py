import torch

import models

torch.manual_seed(0)
model, data = models.fp8(models.Gpt(), "delayed"), models.Text()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for step in range(1, 101):
    loss = models.lm_loss(model, data.batch())
    if step == 1 or not models.BAD:
        optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    models.say(step, loss)
