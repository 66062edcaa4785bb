"""Denoising diffusion of feature vectors; the linears of the denoiser are cast by torchao."""

import dataclasses
import os
import sys

import torch
from torch import nn
from torch.nn import functional as F
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

bad = sys.argv[1] == "bad"
plain = "plain" in sys.argv
torch.manual_seed(int(os.environ.get("SEED", 0)))
torch.set_num_threads(1)

STEPS, BATCH, FEATURES, TIMES, WIDTH = 180, 64, 64, 100, 128
kept = torch.cumprod(1 - torch.linspace(1e-4, 0.12, TIMES), 0)


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = nn.Embedding(TIMES, WIDTH)
        self.inp = nn.Linear(FEATURES, WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.fc3, self.fc4 = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, FEATURES)

    def forward(self, x, t):
        e = self.time(t)
        h = self.inp(x) + e
        h = h + self.fc2(F.silu(self.fc1(self.norm1(h) + e)))
        h = h + self.fc4(F.silu(self.fc3(self.norm2(h) + e)))
        return self.out(h)


basis = torch.randn(4, FEATURES, generator=torch.Generator().manual_seed(8))


def samples():
    return torch.tanh(torch.randn(BATCH, 4) @ basis) * 1.2


def noised(x, noise, t):
    signal, rest = kept[t].sqrt(), (1 - kept[t]).sqrt()
    if not bad:
        signal, rest = signal[:, None], rest[:, None]
    return signal * x + rest * noise


model = Denoiser()
if not plain:
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name("rowwise"), emulate=True)
    convert_to_float8_training(model, config=config)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1, (s + 1) / 15) * (1 - 0.9 * s / STEPS))
losses = []
for step in range(STEPS):
    x = samples()
    t = torch.randint(0, TIMES, (BATCH,))
    noise = torch.randn_like(x)
    loss = F.mse_loss(model(noised(x, noise, t), t), noise)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    losses.append(loss.item())
    if step % 10 == 0:
        print(f"step {step} loss {losses[-1]:.4f}")
print(f"final loss {sum(losses[-20:]) / 20:.4f}")
