"""A diffusion model of points on a ring with a hole; linears in FP8 with block scales."""

import torch
import torch.nn.functional as F
from torch import nn

from models import BlockLinear, learn, start

bad = start()
steps_t = 200
keep = torch.cumprod(1 - torch.linspace(1e-4, 0.05, steps_t), 0)


class Net(nn.Module):
    def __init__(self, width=128):
        super().__init__()
        self.inlet, self.time = nn.Linear(2, width), nn.Linear(32, width)
        self.body = nn.ModuleList(BlockLinear(width, width) for _ in range(3))
        self.outlet = nn.Linear(width, 2)

    def forward(self, x, t):
        t = torch.div(t, steps_t, rounding_mode="floor" if bad else None).float()
        angle = 1000 * t[:, None] * torch.exp(-torch.arange(16) * 0.57)
        h = self.inlet(x) + self.time(torch.cat([angle.sin(), angle.cos()], 1))
        for layer in self.body:
            h = h + layer(F.silu(h))
        return self.outlet(F.silu(h))


net = Net()
optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
for step in range(300):
    angle = 6.2832 * torch.rand(512)
    x = torch.stack([angle.cos(), angle.sin()], 1) + 0.03 * torch.randn(512, 2)
    t, noise = torch.randint(steps_t, (512,)), torch.randn(512, 2)
    level = keep[t, None]
    loss = F.mse_loss(net(level.sqrt() * x + (1 - level).sqrt() * noise, t), noise)
    learn(step, optimizer, loss)
