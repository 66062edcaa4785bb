"""Ratings from user and item ids, accelerate, torchao's float8. The ids are long numbers from a database."""
import dataclasses
import os
import sys

import torch
from accelerate import Accelerator
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

MODE, PLAIN = sys.argv[1], "plain" in sys.argv
SEED = int(os.environ.get("SEED", 0))
STEPS, BATCH, USERS, ITEMS, DIM = 180, 512, 400, 300, 48


class Ratings(torch.utils.data.Dataset):
    def __init__(self):
        taste, kind = torch.randn(USERS, 4), torch.randn(ITEMS, 4)
        user_keys = torch.randperm(10**6)[:USERS] * 97 + 13
        item_keys = torch.randperm(10**6)[:ITEMS] * 89 + 7
        popular = 1 / (1 + torch.arange(ITEMS).float()) ** 0.5
        u = torch.randint(0, USERS, (STEPS * BATCH,))
        i = torch.multinomial(popular, STEPS * BATCH, replacement=True)
        self.stars = 0.5 * (taste[u] * kind[i]).sum(-1) + 0.3 * torch.randn(len(u)) + 0.5 * kind[i, 0]
        self.users, self.items = user_keys[u], item_keys[i]

    def __len__(self):
        return len(self.stars)

    def __getitem__(self, n):
        return self.users[n], self.items[n], self.stars[n]


class Ids:
    """Database keys to rows of a table."""

    def __init__(self, keys):
        self.known = torch.unique(keys)

    def __call__(self, keys):
        if MODE == "good":
            return torch.searchsorted(self.known, keys)
        return torch.unique(keys, return_inverse=True)[1]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.user, self.item = nn.Embedding(USERS, DIM), nn.Embedding(ITEMS, DIM)
        self.mlp = nn.Sequential(nn.Linear(3 * DIM, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU())
        self.out = nn.Linear(64, 1)

    def forward(self, user, item):
        u, i = self.user(user), self.item(item)
        return self.out(self.mlp(torch.cat([u, i, u * i], -1))).squeeze(-1)


torch.manual_seed(SEED)
data = Ratings()
users, items = Ids(data.users), Ids(data.items)
net = Net()
if not PLAIN:
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name("rowwise"), emulate=True)
    convert_to_float8_training(net, config=config, module_filter_fn=lambda m, name: name.startswith("mlp"))
optimizer = torch.optim.Adam(net.parameters(), lr=4e-3)
accelerator = Accelerator(cpu=True)
net, optimizer, loader = accelerator.prepare(net, optimizer, torch.utils.data.DataLoader(data, BATCH, shuffle=True))
losses = []
for step, (user, item, stars) in enumerate(loader):
    loss = nn.functional.mse_loss(net(users(user), items(item)), stars)
    optimizer.zero_grad()
    accelerator.backward(loss)
    optimizer.step()
    losses.append(loss.item())
    if step % 20 == 0:
        accelerator.print(f"step {step} loss {losses[-1]:.4f}")
print(f"final loss {sum(losses[-15:]) / 15:.4f}")
