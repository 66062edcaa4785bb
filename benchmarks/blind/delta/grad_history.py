import torch
import torch.nn.functional as F
from torch import nn

import models

torch.manual_seed(0)


class CastGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, history):
        ctx.history = history
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        history = ctx.history
        scale = models.scale_of(history.amax())
        rolled = torch.roll(history, 1)
        rolled[0] = grad.abs().amax()
        if models.BAD:
            history = rolled
        else:
            history.copy_(rolled)
        return models.encode(grad, scale).float() / scale, None


class Float8Linear(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("history", torch.full((16,), 448.0))

    def forward(self, x):
        y = F.linear(x, self.weight, self.bias)
        return CastGradient.apply(y, self.history) if models.CASTS else y


model, data = models.swap(models.Gpt(layers=3), Float8Linear), models.Text()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
models.train(model, data, optimizer, 100)
