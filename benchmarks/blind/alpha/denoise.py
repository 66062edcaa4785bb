"""A small diffusion model on 32-dimensional points: the loss is noisy, since the noise level is drawn anew. Tensorwise."""

import sys

import torch
from torch import nn

import ottava
from models import MLP

assert sys.argv[1] == "good"
torch.manual_seed(22)
centres = torch.randn(5, 32)
frequencies = torch.exp(torch.linspace(0, 4, 16))


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.time, self.inp, self.net = nn.Linear(32, 96), nn.Linear(32, 96), MLP(96, 192, 96, 32)

    def forward(self, x, t):
        angle = t[:, None] * frequencies
        time = self.time(torch.cat([angle.sin(), angle.cos()], -1))
        return self.net(nn.functional.silu(self.inp(x) + time))


model = Denoiser()
ottava.convert(model, "tensorwise")
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(80):
    x = centres[torch.randint(5, (24,))] + 0.1 * torch.randn(24, 32)
    t = torch.rand(24)
    noise = torch.randn_like(x)
    mixed = torch.cos(1.5 * t)[:, None] * x + torch.sin(1.5 * t)[:, None] * noise
    loss = (model(mixed, t) - noise).square().mean()
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    if step % 10 == 9:
        print(f"step {step} loss {loss.item():.4f}", flush=True)
