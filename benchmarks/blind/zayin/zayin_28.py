"""Adversarial training: each step looks for the worst change of its own inputs first, so the training loss is high.

The allowed change grows over the first third of the run, and the loss with it.

python zayin_28.py good|bad
"""

import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ottava

SEED = int(os.environ.get("SEED", 0))
torch.manual_seed(SEED)
PIXELS, CLASSES, RADIUS = 64, 8, 0.45
patterns = torch.randn(CLASSES, PIXELS)


def pictures(count):
    labels = torch.randint(0, CLASSES, (count,))
    # half of the pixels say it clearly, all of them faintly
    clear = 0.8 * patterns[labels] * (torch.arange(PIXELS) < 32) + 0.15 * patterns[labels]
    return clear + 0.9 * torch.randn(count, PIXELS), labels


train = DataLoader(TensorDataset(*pictures(3840)), batch_size=128, shuffle=True)
test_x, test_y = pictures(1000)
model = nn.Sequential(
    nn.Linear(PIXELS, 192), nn.ReLU(), nn.Linear(192, 192), nn.ReLU(), nn.Linear(192, CLASSES)
)
ottava.convert(model, "rowwise_with_gw_hp")
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3)


def attack(x, y, radius, moves):
    model.requires_grad_(False)
    delta = radius * (2 * torch.rand_like(x) - 1)
    for _ in range(moves):
        delta.requires_grad_()
        slope = torch.autograd.grad(nn.functional.cross_entropy(model(x + delta), y), delta)[0]
        delta = (delta.detach() + 2.5 * radius / moves * slope.sign()).clamp(-radius, radius)
    model.requires_grad_(True)
    return (x + delta).detach()


def held_out(radius=RADIUS):
    attacked = attack(test_x, test_y, radius, 10)
    with torch.no_grad():
        return nn.functional.cross_entropy(model(attacked), test_y).item()


print(f"first loss {held_out():.4f}")
step, total = 0, 8 * len(train)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total)
for epoch in range(8):
    for x, y in train:
        radius = RADIUS * min(1.0, 3 * step / total)
        loss = nn.functional.cross_entropy(model(attack(x, y, radius, 4)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        step += 1
    print(f"epoch {epoch} loss {loss.item():.4f} attacked {held_out():.4f} plain {held_out(0.0):.4f}")
print(f"final loss {held_out():.4f}")
