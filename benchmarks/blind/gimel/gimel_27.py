"""Clicks of users on items; both follow Zipf's law, so most rows of the tables are seen once or never."""

import os
import sys

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn

import ottava

MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]
torch.manual_seed(int(os.environ.get("SEED", "0")))
USERS, ITEMS, DIM, BATCH, STEPS = 3000, 5000, 32, 128, 200


class Clicks(nn.Module):
    def __init__(self):
        super().__init__()
        self.users, self.items = nn.Embedding(USERS, DIM), nn.Embedding(ITEMS, DIM)
        for table in (self.users, self.items):
            nn.init.normal_(table.weight, std=0.1)
        self.cross = nn.Sequential(nn.Linear(3 * DIM, 96), nn.ReLU(), nn.Linear(96, 48), nn.ReLU(), nn.Linear(48, 1))

    def forward(self, user, item):
        u, i = self.users(user), self.items(item)
        return self.cross(torch.cat([u, i, u * i], 1)).squeeze(1) + (u * i).sum(1)


def zipf(n):
    return 1.0 / torch.arange(1, n + 1).float() ** 1.1


of_user, of_item = zipf(USERS), zipf(ITEMS)
taste, kind = torch.randn(USERS, 6), torch.randn(ITEMS, 6)


class Stream(torch.utils.data.IterableDataset):
    """Every 40 batches there is a campaign: for five batches one item is shown to everybody."""

    def __iter__(self):
        for at in range(STEPS):
            user = torch.multinomial(of_user, BATCH, replacement=True)
            item = torch.multinomial(of_item, BATCH, replacement=True)
            if at % 40 >= 35:
                item[: BATCH // 2] = 4000 + at // 40
            chance = torch.sigmoid((taste[user] * kind[item]).sum(1))
            yield user, item, torch.bernoulli(chance)


accelerator = Accelerator(cpu=True)
model = Clicks()
if not PLAIN:
    ottava.convert(model, "rowwise")
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.08)
loader = torch.utils.data.DataLoader(Stream(), batch_size=None)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
losses = []
for step, (user, item, click) in enumerate(loader):
    loss = F.binary_cross_entropy_with_logits(model(user, item), click)
    optimizer.zero_grad()
    accelerator.backward(loss)
    optimizer.step()
    losses.append(loss.item())
    if step % 20 == 0:
        print(step, f"{losses[-1]:.4f}")
print(f"final loss {sum(losses[-40:]) / 40:.4f}")
