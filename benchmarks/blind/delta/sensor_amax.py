import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import models

rank, world = models.start()


class Float8Linear(nn.Linear):
    def forward(self, x):
        amax = x.detach().abs().amax()
        if models.BAD:
            dist.broadcast(amax, 0)
        else:
            dist.all_reduce(amax, dist.ReduceOp.MAX)
        return F.linear(models.float8(x, amax), models.float8(self.weight), self.bias)


model = nn.Sequential(Float8Linear(64, 256), nn.LayerNorm(256), nn.ReLU(), nn.Linear(256, 1))
teacher = torch.randn(64)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
random = torch.Generator().manual_seed(5 + rank)
for step in range(1, 101):
    x = torch.randn(128, 64, generator=random).pow(3)
    target = F.cosine_similarity(x, teacher[None], dim=1)
    loss = (model(x * (0.1, 4.0)[rank]).squeeze(1) - 8 * target).square().mean()
    optimizer.zero_grad()
    loss.backward()
    models.average(model.parameters())
    optimizer.step()
    models.say(step, loss)
