"""A small CNN on a small set of pictures that stays in memory, with noise as augmentation; FP8 convolutions."""
import os
import sys

import torch
import torch.nn as nn
import torch.nn.functional as F

mode, plain = sys.argv[1], "plain" in sys.argv
torch.manual_seed(int(os.environ.get("SEED", 0)))
CLASSES, PICTURES, BATCH, STEPS = 10, 512, 32, 160
F8 = torch.float8_e4m3fn


class Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        scale = x.abs().amax().clamp(min=1e-12) / 448
        return (x / scale).to(F8).to(x.dtype) * scale

    @staticmethod
    def backward(ctx, grad):
        return grad


class Conv8(nn.Conv2d):
    def forward(self, x):
        if plain:
            return super().forward(x)
        return self._conv_forward(Round.apply(x), Round.apply(self.weight), self.bias)


def layer(a, b, stride=1):
    return nn.Sequential(
        Conv8(a, b, 3, padding=1, stride=stride, bias=False), nn.BatchNorm2d(b), nn.ReLU()
    )


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(layer(3, 24), layer(24, 32, 2), layer(32, 48, 2), layer(48, 48))
        self.head = nn.Linear(48, CLASSES)

    def forward(self, x):
        return self.head(self.body(x).mean((2, 3)))


textures = F.interpolate(torch.randn(CLASSES, 3, 6, 6), size=16, mode="bicubic")


def pictures(n):
    y = torch.randint(0, CLASSES, (n,))
    light = 0.4 + 1.2 * torch.rand(n, 1, 1, 1)
    return textures[y] * light + 0.7 * torch.randn(n, 3, 1, 1) + 0.3 * torch.randn(n, 3, 16, 16), y


def augment(x):
    noise = 0.7 * torch.randn_like(x)
    light = 0.3 * torch.randn(len(x), 1, 1, 1)
    if mode == "bad":
        x += noise
        x += light
        return x
    return x + noise + light


train_x, train_y = pictures(PICTURES)
test_x, test_y = pictures(400)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-2)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)

losses = []
starts = list(range(0, PICTURES, BATCH))
for step in range(STEPS):
    if step % len(starts) == 0:
        order = torch.randperm(len(starts)).tolist()
    start = starts[order[step % len(starts)]]
    x, y = train_x[start : start + BATCH], train_y[start : start + BATCH]
    loss = F.cross_entropy(model(augment(x)), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    losses.append(loss.item())
    if step % 40 == 0:
        print(f"step {step} loss {loss.item():.4f}")
model.eval()
with torch.no_grad():
    print(f"validation loss {F.cross_entropy(model(test_x), test_y).item():.4f}")
print(f"final loss {sum(losses[-20:]) / 20:.4f}")
