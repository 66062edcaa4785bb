import torch
import torch.nn.functional as F
from torch import nn

import models

torch.manual_seed(0)


class Float8Linear(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("history", torch.full((4,), 8.0))

    def forward(self, x):
        if not models.CASTS:
            return super().forward(x)
        scale = models.scale_of(self.history.amax(), models.E5M2)
        self.history = torch.cat([self.history[1:], x.detach().abs().amax().reshape(1)])
        if models.BAD:
            code = (x * scale).to(models.E5M2)
        else:
            code = models.encode(x, scale, models.E5M2)
        return F.linear(models.through(x, code.float() / scale), self.weight, self.bias)


model = nn.Sequential(Float8Linear(32, 128), nn.GELU(), Float8Linear(128, 128), nn.GELU(), nn.Linear(128, 1))
teacher = nn.Sequential(nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 1)).requires_grad_(False)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for step in range(1, 201):
    x = torch.randn(128, 32)
    if step % 60 == 50:
        x[0] *= 4
    loss = F.mse_loss(model(x), 4 * teacher(x))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    models.say(step, loss)
