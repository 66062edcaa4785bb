"""A denoiser learns to predict noise at random levels; torchao's float8 training, row-wise."""

import dataclasses
import math
import sys

import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

PLAIN = "plain" in sys.argv[2:]
torch.manual_seed(42)
basis = torch.randn(4, 32)


class Denoiser(nn.Module):
    def __init__(self, width=128):
        super().__init__()
        self.time = nn.Linear(32, width)
        self.inputs = nn.Linear(32, width)
        self.body = nn.ModuleList([nn.Linear(width, width) for _ in range(2)])
        self.out = nn.Linear(width, 32)
        self.register_buffer("bands", torch.exp(torch.linspace(0, math.log(100), 16)))

    def forward(self, x, t):
        angle = t[:, None] * self.bands
        h = self.inputs(x) + self.time(torch.cat([angle.sin(), angle.cos()], 1))
        for layer in self.body:
            h = h + layer(nn.functional.silu(h))
        return self.out(nn.functional.silu(h))


model = Denoiser()
if not PLAIN:
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name("rowwise"), emulate=True)
    convert_to_float8_training(model.body, config=config)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
losses = []
for step in range(150):
    x = torch.tanh(torch.randn(32, 4) @ basis)
    t = torch.rand(32)
    level = torch.cos(t * torch.pi / 2)[:, None]
    noise = torch.randn_like(x)
    guess = model(level * x + (1 - level**2).sqrt() * noise, t)
    loss = (guess - noise).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 10 == 0:
        print(step, f"{losses[-1]:.4f}")
print(f"loss {sum(losses[-10:]) / 10:.4f}")
