"""Diffusion on points of 64 dimensions: a network predicts the noise; its linears run under mxfp8."""

import math
import os
import sys

import torch
from torch import nn

import ottava

MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]
torch.manual_seed(int(os.environ.get("SEED", "0")))
DIM, WIDTH, TIMES, STEPS, BATCH = 64, 128, 100, 200, 64

kept = torch.cumprod(1 - torch.linspace(1e-3, 0.12, TIMES), 0)


def draw_times(n):
    return torch.randint(0, TIMES, (n,))


def embed(t):
    rate = torch.exp(-math.log(1000) * torch.arange(WIDTH // 2) / (WIDTH // 2))
    angle = t[:, None] * rate
    return torch.cat([angle.sin(), angle.cos()], 1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.time = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x, emb):
        return x + self.down(nn.functional.silu(self.up(self.norm(x) + self.time(emb))))


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Linear(DIM, WIDTH), nn.Linear(WIDTH, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x, t):
        emb, x = embed(t), self.enter(x)
        for block in self.blocks:
            x = block(x, emb)
        return self.leave(x)


centres = 2 * torch.randn(6, DIM)


def add_noise(clean, t):
    noise = torch.randn_like(clean)
    level = kept[t]
    if MODE == "good":
        level = level.unsqueeze(1)
    return level.sqrt() * clean + (1 - level).sqrt() * noise, noise


def training_loss(net, clean):
    t = draw_times(len(clean))
    noisy, noise = add_noise(clean, t)
    return nn.functional.mse_loss(net(noisy, t), noise)


net = Denoiser()
if not PLAIN:
    ottava.convert(net, "mxfp8")
optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
losses = []
for step in range(STEPS):
    clean = centres[torch.randint(0, 6, (BATCH,))] + 0.1 * torch.randn(BATCH, DIM)
    loss = training_loss(net, clean)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    losses.append(loss.item())
    if step % 25 == 0:
        print(step, f"{losses[-1]:.4f}")
print(f"final loss {sum(losses[-20:]) / 20:.4f}")
