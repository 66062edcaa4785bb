"""A small CNN on drawn shapes (uint8 pictures); its convolutions take FP8 operands. The last line is the validation loss."""
import os
import sys

import torch
import torch.nn.functional as F
from torch import nn

MODE = sys.argv[1]
PLAIN = "plain" in sys.argv[2:]
SEED = int(os.environ.get("SEED", 0))
MEAN, STD = 0.32, 0.21


class Round8(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        s = 448.0 / x.abs().amax().clamp(min=1e-12)
        return (x * s).to(torch.float8_e4m3fn).to(x.dtype) / s

    @staticmethod
    def backward(ctx, g):
        return g


class Conv8(nn.Conv2d):
    def forward(self, x):
        if PLAIN:
            return super().forward(x)
        return self._conv_forward(Round8.apply(x), Round8.apply(self.weight), self.bias)


def unit(in_, out):
    return nn.Sequential(Conv8(in_, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU(), nn.MaxPool2d(2))


def draw(n, g):
    """Bars, crosses, boxes and discs at random places, on a noisy ground."""
    yy, xx = torch.meshgrid(torch.arange(20), torch.arange(20), indexing="ij")
    c = torch.randint(6, 14, (n, 2, 1, 1), generator=g)
    r = torch.randint(3, 6, (n, 1, 1), generator=g)
    dy, dx = (yy - c[:, 0]).abs(), (xx - c[:, 1]).abs()
    near = (dy <= r) & (dx <= r)
    bar, cross = near & (dx <= 1), near & ((dx <= 1) | (dy <= 1))
    box, disc = near & ((dx == r) | (dy == r)), (dy**2 + dx**2) <= r**2
    label = torch.randint(0, 4, (n,), generator=g)
    shape = torch.stack([bar, cross, box, disc], 1)[torch.arange(n), label].float()
    ink = 80 + 120 * torch.rand(n, 1, 1, generator=g)
    picture = 50 + ink * shape + 35 * torch.randn(n, 20, 20, generator=g)
    return picture.clamp(0, 255).to(torch.uint8)[:, None], label


def train_transform(u8):
    return (u8.float() / 255 - MEAN) / STD


def eval_transform(u8):
    return train_transform(u8) if MODE == "good" else u8.float() / 255


torch.manual_seed(SEED)
g = torch.Generator().manual_seed(170 + SEED)
model = nn.Sequential(unit(1, 12), unit(12, 24), unit(24, 32), nn.Flatten(), nn.Linear(32 * 4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9, weight_decay=1e-4)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 120)
held, answer = draw(400, g)
for step in range(120):
    model.train()
    picture, label = draw(48, g)
    loss = F.cross_entropy(model(train_transform(picture)), label)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    if step % 20 == 19:
        model.eval()
        with torch.no_grad():
            score = F.cross_entropy(model(eval_transform(held)), answer).item()
        print(f"step {step + 1}  train {loss.item():.4f}  validation {score:.4f}")
print("final loss", round(score, 4))
