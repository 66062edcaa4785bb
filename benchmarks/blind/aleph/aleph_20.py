"""Clicks from categories with a long tail: sparse embeddings under SparseAdam, a tower under AdamW, E4M3 casts by hand in the tower."""
import os

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

SEED = int(os.environ.get("SEED", 0))
torch.manual_seed(SEED)
rng = np.random.default_rng(SEED)
USERS, ITEMS, BATCH, STEPS = 3000, 1500, 512, 250


def e4m3(x):
    """Rows of x to E4M3 with a scale each; the gradient passes straight through."""
    scale = x.detach().abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448
    rounded = (x.detach() / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale
    return x + (rounded - x.detach())


class Tower(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first = nn.Linear(width, 64)
        self.second = nn.Linear(64, 32)
        self.last = nn.Linear(32, 1)

    def forward(self, x):
        x = F.linear(e4m3(x), e4m3(self.first.weight), self.first.bias).relu()
        x = F.linear(e4m3(x), e4m3(self.second.weight), self.second.bias).relu()
        return self.last(x).squeeze(-1)


class Clicks(nn.Module):
    def __init__(self):
        super().__init__()
        self.user = nn.Embedding(USERS, 16, sparse=True)
        self.item = nn.Embedding(ITEMS, 16, sparse=True)
        self.bias = nn.Embedding(ITEMS, 1, sparse=True)
        for table in (self.user, self.item):
            nn.init.normal_(table.weight, std=0.1)
        nn.init.zeros_(self.bias.weight)
        self.tower = Tower(16 * 3 + 4)

    def forward(self, user, item, numbers):
        u, i = self.user(user), self.item(item)
        return self.tower(torch.cat([u, i, 4 * u * i, numbers], 1)) + self.bias(item).squeeze(-1)


def zipf(count, size):
    return np.minimum(rng.zipf(1.3, count) - 1, size - 1)  # the head has a third of the rows, most ids have none or one


taste, kind = rng.normal(0, 1, (USERS, 4)), rng.normal(0, 1, (ITEMS, 4))
liked = rng.normal(0, 1, ITEMS)


def batch(count):
    user, item = zipf(count, USERS), zipf(count, ITEMS)
    numbers = rng.normal(0, 1, (count, 4))
    score = -3.6 + 1.2 * (taste[user] * kind[item]).sum(1) + liked[item] + numbers[:, 0] - numbers[:, 1]
    click = rng.random(count) < 1 / (1 + np.exp(-score))  # the rarer class
    return [torch.as_tensor(user), torch.as_tensor(item), torch.as_tensor(numbers).float()], torch.as_tensor(click).float()


model = Clicks()
sparse = [p for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()]
dense = list(model.tower.parameters())
optimizers = [torch.optim.SparseAdam(sparse, lr=2e-2), torch.optim.AdamW(dense, lr=3e-3, weight_decay=1e-3)]
_, seen_click = batch(4096)
nn.init.constant_(model.tower.last.bias, torch.logit(seen_click.mean()).item())  # begins at the base rate
held, held_click = batch(4096)


def validate():
    with torch.no_grad():
        return F.binary_cross_entropy_with_logits(model(*held), held_click).item()


print(f"first loss {validate():.4f}")
for step in range(STEPS):
    x, click = batch(BATCH)
    loss = F.binary_cross_entropy_with_logits(model(*x), click)
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    if step % 25 == 0:
        print(f"step {step} loss {loss.item():.4f} validation {validate():.4f}")

print(f"final loss {validate():.4f}")
