"""Next frame of a field of 64 points from its last two, under delayed scaling with a margin tuned to fill the format."""

import sys

import torch
from torch import nn

import ottava

margin = {"good": 0, "bad": -4}[sys.argv[1]]
torch.manual_seed(13)
POINTS = 64
grid = torch.arange(POINTS) / POINTS * 6.2832


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


def fields(n=64):
    k = torch.randint(1, 6, (n, 1))
    phase, speed, size = 6.2832 * torch.rand(n, 1), 0.2 + 0.6 * torch.rand(n, 1), 0.5 + 1.5 * torch.rand(n, 1)
    frames = [size * torch.sin(k * (grid - speed * i) + phase) for i in range(3)]
    return torch.cat(frames[:2], 1), frames[2]


model = nn.Sequential(nn.Linear(2 * POINTS, 96), Residual(96), Residual(96), nn.Linear(96, POINTS))
ottava.convert(model, ottava.get_recipe("delayed", margin=margin, amax_history_len=16))
opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(80):
    x, y = fields()
    loss = (model(x) - y).square().mean()
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    if step % 10 == 9:
        print(f"step {step} loss {loss.item():.4f}", flush=True)
