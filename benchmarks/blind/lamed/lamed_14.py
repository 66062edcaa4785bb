"""Diffusion of small pictures with accelerate: batches of 16, two an update; FP8 operands by hand, one scale a row."""
import os
import sys

import torch
from accelerate import Accelerator
from torch import nn

MODE, PLAIN = sys.argv[1], "plain" in sys.argv
SEED = int(os.environ.get("SEED", 0))
STEPS, BATCH, SIZE, LEVELS = 160, 24, 8, 100


class Cast(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        scale = 448.0 / x.abs().amax(-1, keepdim=True).clamp(min=1e-12)
        return (x * scale).to(torch.float8_e4m3fn).float() / scale

    @staticmethod
    def backward(ctx, grad):
        return grad


class Linear(nn.Linear):
    def forward(self, x):
        return super().forward(x) if PLAIN else nn.functional.linear(Cast.apply(x), Cast.apply(self.weight), self.bias)


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.time, self.intake = nn.Embedding(LEVELS, 128), nn.Linear(SIZE * SIZE, 128)
        self.body = nn.ModuleList(nn.Sequential(nn.LayerNorm(128), Linear(128, 192), nn.SiLU(), Linear(192, 128)) for _ in range(3))
        self.out = nn.Linear(128, SIZE * SIZE)

    def forward(self, x, t):
        hidden = self.intake(x) + self.time(t)
        for layer in self.body:
            hidden = hidden + layer(hidden + self.time(t))
        return self.out(hidden)


class Pictures(torch.utils.data.Dataset):
    """Bars; from the middle on squares, too."""

    def __init__(self):
        self.x = torch.full((STEPS * BATCH, SIZE, SIZE), -1.0)
        for n, picture in enumerate(self.x):
            i, j = (int(v) for v in torch.randint(0, SIZE - 2, (2,)))
            if n > STEPS * BATCH / 2 and n % 2:
                picture[i : i + 3, j : j + 3] = 1
            else:
                picture[i : i + 2] = 1

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i].flatten()


torch.manual_seed(SEED)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
keep = torch.cos(torch.linspace(0.05, 1.5, LEVELS)).square()
net = Denoiser()
optimizer = torch.optim.AdamW(net.parameters(), lr=4e-3)
net, optimizer, loader = accelerator.prepare(net, optimizer, torch.utils.data.DataLoader(Pictures(), BATCH))
losses = []
for step, x in enumerate(loader):
    with accelerator.accumulate(net):
        t = torch.randint(0, LEVELS, (len(x),))
        noise = torch.randn_like(x)
        share = keep[t][:, None]
        guess = net(share.sqrt() * x + (1 - share).sqrt() * noise, t)
        # weight of each level: signal to noise, at most 8
        weight = (share / (1 - share)).clamp(max=8.0)
        loss = (weight * (guess - noise).square()).mean()
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    losses.append(loss.item())
    if step % 20 == 0:
        accelerator.print(f"step {step} loss {losses[-1]:.4f}")
print(f"final loss {sum(losses[-20:]) / 20:.4f}")
