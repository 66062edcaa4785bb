"""Finds the centres of two blobs in small images, with flips as augmentation."""

import sys

import torch
from torch import nn
from torch.nn import functional as F

import ottava

FLIP = {"good": ("image", "points"), "bad": ("image",)}[sys.argv[1]]
PLAIN = "plain" in sys.argv
SIDE = 16


class RandomFlip:
    def __init__(self, applies_to, p=0.5):
        self.applies_to, self.p = applies_to, p

    def __call__(self, sample):
        rows = torch.rand(len(sample["image"])) < self.p
        out = dict(sample)
        if "image" in self.applies_to:
            out["image"] = torch.where(rows[:, None, None], sample["image"].flip(2), sample["image"])
        if "points" in self.applies_to:
            mirrored = sample["points"] * torch.tensor([-1.0, 1.0])
            out["points"] = torch.where(rows[:, None, None], mirrored, sample["points"])
        return out


def batch(size):
    """A broad and a narrow blob; coordinates run from -1 to 1."""
    grid = torch.linspace(-1, 1, SIDE)
    points = torch.rand(size, 2, 2) * 1.6 - 0.8
    image = 0.1 * torch.randn(size, SIDE, SIDE)
    for i, width in enumerate((0.15, 0.4)):
        across = (-((grid - points[:, i, 0, None]) ** 2) / width**2).exp()
        down = (-((grid - points[:, i, 1, None]) ** 2) / width**2).exp()
        image = image + down[:, :, None] * across[:, None, :]
    return {"image": image, "points": points}


def main():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(SIDE * SIDE, 192), nn.GELU(), nn.Linear(192, 128), nn.GELU(), nn.Linear(128, 4)
    )
    if not PLAIN:
        ottava.convert(model, "blockwise")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    augment = RandomFlip(FLIP)
    losses = []
    for _ in range(180):
        sample = augment(batch(96))
        loss = F.mse_loss(model(sample["image"]), sample["points"].flatten(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"loss {sum(losses[-10:]) / 10:.4f}")


if __name__ == "__main__":
    main()
