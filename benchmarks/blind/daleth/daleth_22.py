"""A small U-Net finds spots that cover one pixel in a hundred, with a Dice loss; convolutions with FP8 casts by hand."""
import os

import torch
import torch.nn.functional as F
from torch import nn

SEED = int(os.environ.get("SEED", "0"))
torch.manual_seed(SEED)
SIZE = 24


def scans(count):
    """Noise, a broad bright band that is no spot, and in most scans one or two small spots."""
    y, x = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    mask = torch.zeros(count, SIZE, SIZE)
    for _ in range(2):
        centre = torch.randint(2, SIZE - 2, (count, 2, 1, 1))
        near = (y - centre[:, 0]) ** 2 + (x - centre[:, 1]) ** 2 <= 1
        mask = torch.maximum(mask, (near & (torch.rand(count, 1, 1) < 0.7)).float())
    band = torch.sigmoid(6 - (x + torch.randint(-SIZE, 1, (count, 1, 1))).abs().float())
    image = 0.5 * torch.randn(count, SIZE, SIZE) + 2.0 * band + 3.0 * mask
    return image[:, None], mask[:, None]


class Cast(torch.autograd.Function):
    """E4M3 on the way forward, E5M2 for the gradient, each with a scale for the whole tensor."""

    @staticmethod
    def forward(ctx, x, back):
        ctx.back = back
        return x if back else fp8(x, torch.float8_e4m3fn)

    @staticmethod
    def backward(ctx, grad):
        return (fp8(grad, torch.float8_e5m2) if ctx.back else grad), None


def fp8(x, dtype):
    top = torch.finfo(dtype).max
    scale = top / x.abs().amax().clamp(min=1e-20)
    return (x * scale).clamp(-top, top).to(dtype).to(x.dtype) / scale


class Conv(nn.Conv2d):
    def forward(self, x):
        y = F.conv2d(Cast.apply(x, False), Cast.apply(self.weight, False), padding=self.padding)
        return Cast.apply(y, True) + self.bias[:, None, None]


def stage(inputs, outputs):
    return nn.Sequential(Conv(inputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.ReLU())


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Sequential(nn.Conv2d(1, 12, 3, padding=1), nn.ReLU())
        self.down, self.deep, self.up = stage(12, 24), stage(24, 24), stage(36, 12)
        self.head = nn.Conv2d(12, 1, 1)

    def forward(self, x):
        fine = self.enter(x)
        deep = self.deep(self.down(F.max_pool2d(fine, 2)))
        return self.head(self.up(torch.cat([fine, F.interpolate(deep, scale_factor=2)], 1))).sigmoid()


def dice(guess, mask):
    """One minus the overlap of a batch."""
    return 1 - (2 * (guess * mask).sum() + 1) / (guess.sum() + mask.sum() + 1)


net = UNet()
optimizer = torch.optim.NAdam(net.parameters(), 3e-3)
held = scans(128)
with torch.no_grad():
    print("first loss %.4f" % dice(net(held[0]), held[1]).item())
for step in range(150):
    image, mask = scans(16)
    loss = dice(net(image), mask)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 25 == 0:
        print(f"step {step}: {loss.item():.4f}")
net.eval()
with torch.no_grad():
    print("final loss %.4f" % dice(net(held[0]), held[1]).item())
