import torch
import torch.nn.functional as F
from torch import nn

import models

torch.manual_seed(0)


class Float8Linear(nn.Linear):
    first_microbatch, cached = True, None

    def forward(self, x):
        if not models.CASTS:
            return super().forward(x)
        if self.first_microbatch or self.cached is None:
            self.cached = models.float8(self.weight.detach())
        return F.linear(models.float8(x), models.through(self.weight, self.cached), self.bias)


model, data = models.swap(models.Gpt(layers=3), Float8Linear), models.Text()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
micro = 0
for step in range(1, 101):
    optimizer.zero_grad()
    for part in range(2):
        Float8Linear.first_microbatch = (micro if models.BAD else part) == 0
        loss = models.lm_loss(model, data.batch())
        (loss / 2).backward()
        micro += 1
    optimizer.step()
    models.say(step, loss)
