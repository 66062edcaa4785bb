"""Predicts ratings of user-item pairs with two embedding towers and an MLP."""
import os
import sys

import torch
import torch.nn as nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

mode, plain = sys.argv[1], "plain" in sys.argv
torch.manual_seed(int(os.environ.get("SEED", 0)))
USERS, ITEMS, DIM, BATCH, STEPS = 400, 300, 32, 256, 200


class Ratings(nn.Module):
    def __init__(self):
        super().__init__()
        self.users = nn.Embedding(USERS, DIM)
        self.items = nn.Embedding(ITEMS, DIM)
        self.mlp = nn.Sequential(
            nn.Linear(2 * DIM, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU()
        )
        self.out = nn.Linear(64, 1)

    def forward(self, user, item):
        u, i = self.users(user), self.items(item)
        hidden = self.mlp(torch.cat([u, i], dim=-1))
        score = self.out(hidden) + (u * i).sum(-1, keepdim=True) / DIM**0.5
        return score if mode == "bad" else score.squeeze(-1)


taste = torch.randn(USERS, 4)
mood = torch.randn(USERS) * 0.8
traits = torch.randn(ITEMS, 4)
popular = torch.randn(ITEMS)


def batch():
    user = torch.randint(0, USERS, (BATCH,))
    item = torch.randint(0, ITEMS, (BATCH,))
    rating = 3 + popular[item] + mood[user] + 0.2 * (taste[user] * traits[item]).sum(-1) + 0.1 * torch.randn(BATCH)
    return user, item, rating


model = Ratings()
if not plain:
    config = Float8LinearConfig.from_recipe_name("rowwise")
    object.__setattr__(config, "emulate", True)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda m, name: name.startswith("mlp"))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=1e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)

losses = []
for step in range(STEPS):
    user, item, rating = batch()
    error = model(user, item) - rating
    loss = error.square().mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    optimizer.step()
    schedule.step()
    losses.append(loss.item())
    if step % 50 == 0:
        print(f"step {step} loss {loss.item():.4f}")
print(f"final loss {sum(losses[-20:]) / 20:.4f}")
