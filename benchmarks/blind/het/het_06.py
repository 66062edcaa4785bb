"""Frames of speech-like clips with gaps of digital silence: a frame classifier under accelerate."""
import os
import sys

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

mode = sys.argv[1]
plain = "plain" in sys.argv[2:]
seed = int(os.environ.get("SEED", 0))
torch.manual_seed(seed)

BANDS, FRAMES, PHONES, STEPS, BATCH = 40, 24, 12, 140, 16
shapes = torch.randn(PHONES, BANDS)


class Clips(IterableDataset):
    def __iter__(self):
        g = torch.Generator().manual_seed(seed + 7)
        for _ in range(STEPS * BATCH):
            phones = torch.randint(0, PHONES, (FRAMES // 3,), generator=g).repeat_interleave(3)
            frames = shapes[phones] * (0.5 + torch.rand(1, generator=g)) + 0.9 * torch.randn(FRAMES, BANDS, generator=g)
            if torch.rand(1, generator=g) < 0.002:
                gap = int(torch.randint(0, FRAMES - 4, (1,), generator=g))
                frames[gap : gap + 4] = 0
            yield frames, phones


class Cast(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        amax = x.abs().amax(-1, keepdim=True)
        if mode == "good":
            amax = amax.clamp(min=1e-10)
        scale = 448 / amax
        return (x * scale).to(torch.float8_e4m3fn).to(x.dtype) / scale

    @staticmethod
    def backward(ctx, grad):
        return grad


class Linear(nn.Linear):
    def forward(self, x):
        if plain:
            return super().forward(x)
        return F.linear(Cast.apply(x), Cast.apply(self.weight), self.bias)


class Acoustic(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Linear(BANDS, 96)
        self.context = nn.Conv1d(96, 96, 3, padding=1)
        self.outer = Linear(96, 64)
        self.head = nn.Linear(64, PHONES)

    def forward(self, frames):
        h = F.gelu(self.inner(frames))
        h = h + F.gelu(self.context(h.transpose(1, 2))).transpose(1, 2)
        return self.head(F.gelu(self.outer(h)))


accelerator = Accelerator(cpu=True)
model = Acoustic()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Clips(), BATCH))
losses = []
for step, (frames, phones) in enumerate(loader):
    loss = F.cross_entropy(model(frames).flatten(0, 1), phones.flatten())
    optimizer.zero_grad()
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    losses.append(loss.item())
    if step % 20 == 0:
        print(f"step {step} loss {loss.item():.4f}")
print(f"final loss {np.mean(losses[-20:]):.4f}")
