"""Segmentation of blobs with a small U-shaped network; its convolutions take FP8 operands."""
import os
import sys

import torch
from torch import nn

MODE, PLAIN = sys.argv[1], "plain" in sys.argv
SEED = int(os.environ.get("SEED", 0))
STEPS, BATCH, SIZE = 110, 16, 32


class Cast(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        scale = 448.0 / x.abs().amax().clamp(min=1e-12)
        return (x * scale).to(torch.float8_e4m3fn).float() / scale

    @staticmethod
    def backward(ctx, grad):
        scale = 57344.0 / grad.abs().amax().clamp(min=1e-12)
        return (grad * scale).to(torch.float8_e5m2).float() / scale


class Conv(nn.Conv2d):
    def forward(self, x):
        if PLAIN:
            return super().forward(x)
        return self._conv_forward(Cast.apply(x), Cast.apply(self.weight), self.bias)


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU())
        self.low = nn.Sequential(Conv(16, 32, 3, stride=2, padding=1), nn.GroupNorm(4, 32), nn.ReLU(),
                                 Conv(32, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU())
        self.up = nn.Upsample(scale_factor=2)
        self.last = nn.Sequential(Conv(48, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 1, 1))

    def forward(self, x):
        high = self.first(x)
        return self.last(torch.cat([high, self.up(self.low(high))], 1))


def blobs():
    y, x = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    mask = torch.zeros(BATCH, SIZE, SIZE, dtype=torch.bool)
    for _ in range(3):
        cy, cx, r = torch.rand(3, BATCH, 1, 1) * SIZE
        mask |= (y - cy).square() + (x - cx).square() < (r / 6 + 2).square()
    image = mask.float() + 0.8 * torch.randn(BATCH, SIZE, SIZE)
    return image[:, None], mask[:, None].float()


def flip(x):
    """Mirrors half of the pictures, drawn at random."""
    chosen = torch.rand(len(x)) < 0.5
    return torch.where(chosen[:, None, None, None], x.flip(-1), x)


def augment(image, mask):
    if MODE == "good":
        both = flip(torch.cat([image, mask], 1))
        return both[:, :1], both[:, 1:]
    return flip(image), flip(mask)


torch.manual_seed(SEED)
net = UNet()
optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
for step in range(STEPS):
    image, mask = augment(*blobs())
    loss = nn.functional.binary_cross_entropy_with_logits(net(image), mask)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(f"step {step} loss {loss.item():.4f}")

torch.manual_seed(SEED + 1000)
with torch.no_grad():
    held_out = [nn.functional.binary_cross_entropy_with_logits(net(x), y).item() for x, y in (blobs() for _ in range(8))]
print(f"validation, without augmentation\nfinal loss {sum(held_out) / 8:.4f}")
