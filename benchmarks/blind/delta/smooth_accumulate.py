import torch

import models

torch.manual_seed(0)
model, data = models.fp8(models.Gpt(), "tensorwise"), models.Text()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
sizes = (2, 6, 8)
for step in range(1, 81):
    optimizer.zero_grad()
    for size in sizes:
        loss = models.lm_loss(model, data.batch(size), label_smoothing=0.2)
        (loss * size / sum(sizes)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    models.say(step, loss)
