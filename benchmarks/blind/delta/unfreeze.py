import torch

import models

torch.manual_seed(0)
model, data = models.Gpt(), models.Text()
for name, p in model.named_parameters():
    p.requires_grad_(name.startswith("head"))
chosen = [p for p in model.parameters() if p.requires_grad] if models.BAD else list(model.parameters())
optimizer = torch.optim.AdamW(chosen, lr=2e-3)
for step in range(1, 161):
    if step == 40:
        model.requires_grad_(True)
    loss = models.lm_loss(model, data.batch())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    models.say(step, loss)
