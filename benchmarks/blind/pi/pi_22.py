"""Segmentation of blobs with augmentation: python pi_22.py good|bad [plain]."""

import sys

import torch
from torch import nn

import ottava

AUGMENT = {"good": "pair", "bad": "image"}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]
STEPS, SIZE = 120, 16


class Mixer(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.stem = nn.Conv2d(1, width, 5, padding=2)
        self.one = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 128), nn.GELU(), nn.Linear(128, width))
        self.depthwise = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.two = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 128), nn.GELU(), nn.Linear(128, width))
        self.head = nn.Linear(width, 1)

    def forward(self, image):
        x = self.stem(image).permute(0, 2, 3, 1)
        x = x + self.one(x)
        x = x + self.depthwise(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        return self.head(x + self.two(x)).squeeze(-1)


def blobs(count):
    grid = torch.stack(torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij"), -1).float()
    centre = torch.rand(count, 1, 1, 2) * (SIZE - 1)
    radius = 2 + 2.5 * torch.rand(count, 1, 1)
    mask = ((grid - centre).norm(dim=-1) < radius).float()
    return mask[:, None] + 0.4 * torch.randn(count, 1, SIZE, SIZE), mask


def augment(image, mask):
    flip = torch.rand(len(image)) < 0.5
    image = torch.where(flip[:, None, None, None], image.flip(-1), image)
    if AUGMENT == "pair":
        mask = torch.where(flip[:, None, None], mask.flip(-1), mask)
    return image, mask


torch.manual_seed(22)
model = Mixer()
if not PLAIN:
    ottava.convert(model, "tensorwise", filter=lambda name, layer: name != "head")
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
losses = []
for _ in range(STEPS):
    image, mask = augment(*blobs(16))
    loss = nn.functional.binary_cross_entropy_with_logits(model(image), mask)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss {sum(losses[-10:]) / 10:.4f}")
