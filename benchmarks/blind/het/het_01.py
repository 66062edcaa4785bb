"""Two-tower recommender with item popularity by a power law: click prediction from sparse rows."""
import os
import sys

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import ottava

mode = sys.argv[1]
plain = "plain" in sys.argv[2:]
seed = int(os.environ.get("SEED", 0))
torch.manual_seed(seed)
rng = np.random.default_rng(seed)

USERS, ITEMS, DIM, STEPS, BATCH = 800, 3000, 64, 160, 512
true_user = rng.normal(size=(USERS, 6))
true_item = rng.normal(size=(ITEMS, 6))
popularity = 1.0 / np.arange(1, ITEMS + 1) ** 1.1
popularity /= popularity.sum()


def batch():
    users = rng.integers(0, USERS, BATCH)
    items = rng.choice(ITEMS, BATCH, p=popularity)
    score = (true_user[users] * true_item[items]).sum(1)
    clicks = rng.random(BATCH) < 1 / (1 + np.exp(-2.0 * score))
    return torch.as_tensor(users), torch.as_tensor(items), torch.as_tensor(clicks, dtype=torch.float32)


class TwoTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.users = nn.Embedding(USERS, DIM, sparse=True)
        self.items = nn.Embedding(ITEMS, DIM, sparse=True)
        self.user_tower = nn.Sequential(nn.Linear(DIM, 128), nn.ReLU(), nn.Linear(128, DIM))
        self.item_tower = nn.Sequential(nn.Linear(DIM, 128), nn.ReLU(), nn.Linear(128, DIM))
        self.bias = nn.Embedding(ITEMS, 1, sparse=True)
        nn.init.zeros_(self.bias.weight)
        for table in (self.users, self.items):
            nn.init.normal_(table.weight, std=0.5)

    def forward(self, users, items):
        u = self.user_tower(self.users(users))
        v = self.item_tower(self.items(items))
        return (u * v).sum(-1) / DIM**0.5 + self.bias(items).squeeze(-1)


model = TwoTower()
if not plain:
    ottava.convert(model, "rowwise")
tables = [model.users.weight, model.items.weight, model.bias.weight]
towers = [*model.user_tower.parameters(), *model.item_tower.parameters()]
sparse = torch.optim.SparseAdam(tables, lr=6e-2)
dense = torch.optim.Adam(towers, lr=4e-3)

losses = []
for step in range(STEPS):
    users, items, clicks = batch()
    loss = F.binary_cross_entropy_with_logits(model(users, items), clicks)
    sparse.zero_grad()
    dense.zero_grad()
    loss.backward()
    sparse.step()
    dense.step()
    losses.append(loss.item())
    if step % 20 == 0:
        print(f"step {step} loss {loss.item():.4f}")
print(f"final loss {np.mean(losses[-20:]):.4f}")
