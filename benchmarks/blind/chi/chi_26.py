"""accelerate: a two-tower recommender with sparse tables; who clicks follows a power law, and so do the batches."""
import os
import sys

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn

SEED = int(os.environ.get("SEED", 0))
USERS, ITEMS, D = 3000, 1200, 24


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.users = nn.EmbeddingBag(USERS, D, mode="sum", sparse=True)
        self.items = nn.EmbeddingBag(ITEMS, D, mode="sum", sparse=True)
        self.user_tower = nn.Sequential(nn.Linear(D, 48), nn.ReLU(), nn.Linear(48, D))
        self.item_tower = nn.Sequential(nn.Linear(D, 48), nn.ReLU(), nn.Linear(48, D))
        for table in (self.users, self.items):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, user, item):
        u = self.user_tower(self.users(user[:, None]))
        i = self.item_tower(self.items(item[:, None]))
        return (u * i).sum(-1)


torch.manual_seed(SEED)
g = torch.Generator().manual_seed(360 + SEED)
taste, kind = torch.randn(USERS, 4, generator=g), torch.randn(ITEMS, 4, generator=g)
popularity = 1.0 / torch.arange(1, ITEMS + 1).float()
activity = 1.0 / torch.arange(1, USERS + 1).float() ** 0.8
accelerator = Accelerator(cpu=True)
model = Towers()
tables = [model.users.weight, model.items.weight]
dense = [p for n, p in model.named_parameters() if "tower" in n]
slow, fast = torch.optim.AdamW(dense, lr=2e-3), torch.optim.SparseAdam(tables, lr=1e-2)
model, slow, fast = accelerator.prepare(model, slow, fast)
losses = []
for step in range(250):
    promoted = step % 25 == 0  # on these days unknown items are shown to everybody
    n = 64 if promoted else 192
    user = torch.multinomial(activity, n, replacement=True, generator=g)
    item = torch.randint(0, ITEMS, (n,), generator=g) if promoted else torch.multinomial(popularity, n, True, generator=g)
    click = (torch.rand(n, generator=g) < torch.sigmoid(2.5 * (taste[user] * kind[item]).sum(-1))).float()
    weight = torch.distributions.Pareto(1.0, 2.2).icdf(torch.rand(n, generator=g))
    loss = (weight * F.binary_cross_entropy_with_logits(model(user, item), click, reduction="none")).mean()
    accelerator.backward(loss)
    slow.step()
    fast.step()
    slow.zero_grad()
    fast.zero_grad()
    losses.append(loss.item())
    if step % 25 == 0:
        accelerator.print(step, round(losses[-1], 4))
print("final loss", round(sum(losses[-40:]) / 40, 4))
