"""A GPT with delayed scaling; the learning rate restarts twice, and the loss jumps a little each time."""

import torch

from models import Decoder, DelayedLinear, Markov

torch.manual_seed(0)
text = Markov(48, branch=3)
model = Decoder(48, width=64, depth=1, linear=DelayedLinear)
optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 60)
for step in range(180):
    loss = model.loss(text.batch(16, 32))
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    print(step, round(loss.item(), 4))
