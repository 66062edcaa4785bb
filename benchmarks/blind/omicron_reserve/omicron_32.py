"""Segmentation of blobs with a patch transformer, with random flips."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

import ottava

JOINT = {"good": True, "bad": False}[sys.argv[1]]
RECIPE = "bf16" if "plain" in sys.argv[2:] else "rowwise"
SIZE, PATCH = 24, 4


class Segmenter(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        self.embed = nn.Linear(PATCH * PATCH, dim)
        self.position = nn.Parameter(0.02 * torch.randn((SIZE // PATCH) ** 2, dim))
        self.layers = nn.ModuleList(
            ottava.nn.TransformerLayer(dim, 128, 4, mask="no_mask", recipe=RECIPE) for _ in range(2)
        )
        self.head = nn.Linear(dim, PATCH * PATCH)

    def forward(self, image):
        x = F.unfold(image, PATCH, stride=PATCH).transpose(1, 2)
        x = self.embed(x) + self.position
        for layer in self.layers:
            x = layer(x)
        return F.fold(self.head(x).transpose(1, 2).float(), (SIZE, SIZE), PATCH, stride=PATCH)


class Flip:
    def __init__(self, chance=0.5, joint=True):
        self.chance, self.joint = chance, joint

    def __call__(self, image, mask):
        flip = torch.rand(len(image), 1, 1, 1) < self.chance
        image = torch.where(flip, image.flip(-1), image)
        return image, torch.where(flip, mask.flip(-1), mask) if self.joint else mask


torch.manual_seed(67)
augment = Flip(joint=JOINT)
grid = torch.arange(SIZE).float()
model = Segmenter()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
losses = []
for _ in range(130):
    centre, radius = SIZE * torch.rand(24, 2, 1, 1), 3 + 4 * torch.rand(24, 1, 1)
    mask = ((grid[:, None] - centre[:, 0]) ** 2 + (grid - centre[:, 1]) ** 2 < radius**2).float()[:, None]
    image, mask = augment(mask + 0.5 * torch.randn_like(mask), mask)
    loss = F.binary_cross_entropy_with_logits(model(image), mask)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss {sum(losses[-10:]) / 10:.4f}")
