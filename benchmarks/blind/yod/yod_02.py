"""A range test of the learning rate, then the training with the rate that it found.

    python yod_02.py good

The test raises the rate by the same factor in each step until the loss is three times its best; then the weights of before
the test are loaded and the real training begins.
"""

import copy
import dataclasses
import math
import os

import torch
import torch.nn.functional as F
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

SEED = int(os.environ.get("SEED", "0"))
CLASSES, PIXELS = 10, 144


class Pictures(torch.utils.data.Dataset):
    """Strokes of ten kinds, shifted by up to one pixel, with noise."""

    def __init__(self, count, seed):
        shapes = (torch.rand(CLASSES, 10, 10, generator=torch.Generator().manual_seed(77 + SEED)) > 0.6).float()
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(CLASSES, (count,), generator=generator)
        shifts = torch.randint(3, (count, 2), generator=generator)
        pictures = torch.zeros(count, 12, 12)
        for i, (label, (dy, dx)) in enumerate(zip(self.labels.tolist(), shifts.tolist())):
            pictures[i, dy : dy + 10, dx : dx + 10] = shapes[label]
        self.pictures = (pictures + 0.7 * torch.randn(count, 12, 12, generator=generator)).flatten(1) - 0.3

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return self.pictures[i], self.labels[i]


def network():
    model = nn.Sequential(
        nn.Linear(PIXELS, 256), nn.LayerNorm(256), nn.ReLU(), nn.Linear(256, 256), nn.LayerNorm(256), nn.ReLU(), nn.Linear(256, CLASSES)
    )
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name("tensorwise"), emulate=True)
    return convert_to_float8_training(model, config=config, module_filter_fn=lambda m, name: name != "6")


def forever(loader):
    while True:
        yield from loader


def step_with(model, optimizer, batch):
    loss = F.cross_entropy(model(batch[0]), batch[1])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def range_test(model, batches, low=1e-3, factor=1.2):
    """A quarter of the rate at which the smoothed loss was lowest."""
    kept = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=low, momentum=0.9)
    best, chosen, smooth, rate = math.inf, low, None, low
    for count in range(90):
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = step_with(model, optimizer, next(batches))
        smooth = loss if smooth is None else 0.7 * smooth + 0.3 * loss
        if smooth < best:
            best, chosen = smooth, rate
        if count % 5 == 0:
            print(f"test: rate {rate:.4f} loss {loss:.4f}")
        if not math.isfinite(loss) or loss > 3 * best:
            break
        rate *= factor
    model.load_state_dict(kept)
    return chosen / 4


def main():
    torch.manual_seed(SEED)
    loader = torch.utils.data.DataLoader(Pictures(20000, 1 + SEED), batch_size=96, shuffle=True, drop_last=True)
    held = Pictures(1500, 5000 + SEED)
    model = network()
    batches = forever(loader)

    def evaluate():
        model.eval()
        with torch.no_grad():
            value = F.cross_entropy(model(held.pictures), held.labels).item()
        model.train()
        return value

    print(f"first loss {evaluate():.4f}")
    rate = range_test(model, batches)
    print(f"the test says {rate:.4f}; held-out {evaluate():.4f}")
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 150)
    for count in range(150):
        loss = step_with(model, optimizer, next(batches))
        schedule.step()
        if count % 25 == 0:
            print(f"step {count} loss {loss:.4f} held-out {evaluate():.4f}")
    print(f"final loss {evaluate():.4f}")


main()
