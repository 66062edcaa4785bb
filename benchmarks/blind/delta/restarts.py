import torch

import models

torch.manual_seed(0)
model, data = models.fp8(models.Gpt(), "mxfp8"), models.Text()
optimizer = torch.optim.AdamW(model.parameters(), lr=8e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=25)
for step in range(1, 126):
    loss = models.lm_loss(model, data.batch())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    models.say(step, loss, every=5)
