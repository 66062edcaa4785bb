"""Segmentation of big noisy maps with a small CNN under accelerate; activations and gradients pass FP8."""
import os
import sys

import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator

mode, plain = sys.argv[1], "plain" in sys.argv
torch.manual_seed(int(os.environ.get("SEED", 0)))
CLASSES, BATCH, SIDE, STEPS = 4, 8, 64, 80


def cast(x, dtype, scaled=True):
    top = torch.finfo(dtype).max
    scale = top / x.abs().amax().clamp(min=1e-30) if scaled else 1.0
    return (x * scale).clamp(-top, top).to(dtype).to(x.dtype) / scale


class Boundary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return cast(x, torch.float8_e4m3fn)

    @staticmethod
    def backward(ctx, grad):
        return cast(grad, torch.float8_e5m2, scaled=mode != "bad")


def boundary(x):
    return x if plain else Boundary.apply(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1 = nn.Conv2d(2, 16, 3, padding=1)
        self.c2 = nn.Conv2d(16, 16, 3, padding=2, dilation=2)
        self.c3 = nn.Conv2d(16, 16, 3, padding=4, dilation=4)
        self.n1, self.n2, self.n3 = (nn.GroupNorm(4, 16) for _ in range(3))
        self.head = nn.Conv2d(16, CLASSES, 1)

    def forward(self, x):
        x = boundary(F.relu(self.n1(self.c1(x))))
        x = boundary(x + F.relu(self.n2(self.c2(x))))
        x = boundary(x + F.relu(self.n3(self.c3(x))))
        return self.head(x)


waves = torch.randn(CLASSES, 2, 4, 4)


def batch():
    low = torch.randn(BATCH, CLASSES, 5, 5)
    y = F.interpolate(low, size=SIDE, mode="bilinear").argmax(1)
    pattern = waves.repeat(1, 1, SIDE // 4, SIDE // 4)
    x = (F.one_hot(y, CLASSES).permute(0, 3, 1, 2)[:, :, None] * pattern[None]).sum(1)
    return x + 0.4 * torch.randn(BATCH, 2, SIDE, SIDE), y


accelerator = Accelerator(cpu=True)
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
model, optimizer = accelerator.prepare(model, optimizer)
losses = []
for step in range(STEPS):
    x, y = batch()
    loss = F.cross_entropy(model(x), y)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
    if step % 20 == 0:
        print(f"step {step} loss {loss.item():.4f}")
print(f"final loss {sum(losses[-20:]) / 20:.4f}")
