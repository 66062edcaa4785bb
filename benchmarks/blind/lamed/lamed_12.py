"""Clicks: two sparse tables with rare ids under SparseAdam, an MLP in torchao's float8. One click in 25 rows."""
import dataclasses
import os
import sys

import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

MODE, PLAIN = sys.argv[1], "plain" in sys.argv
SEED = int(os.environ.get("SEED", 0))
STEPS, BATCH, USERS, ADS, DIM = 180, 128, 3000, 800, 32


class Clicks(nn.Module):
    def __init__(self):
        super().__init__()
        self.user, self.ad = nn.Embedding(USERS, DIM, sparse=True), nn.Embedding(ADS, DIM, sparse=True)
        self.mlp = nn.Sequential(nn.Linear(2 * DIM, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())
        self.out = nn.Linear(32, 1)
        nn.init.constant_(self.out.bias, -3.0)

    def forward(self, user, ad):
        return self.out(self.mlp(torch.cat([self.user(user), self.ad(ad)], -1))).squeeze(-1)


torch.manual_seed(SEED)
popular = 1 / (1 + torch.arange(ADS).float())
active = 1 / (1 + torch.arange(USERS).float()) ** 0.7
quality, habit = torch.randn(ADS) * 1.5, torch.randn(USERS) * 0.8
net = Clicks()
if not PLAIN:
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name("tensorwise"), emulate=True)
    convert_to_float8_training(net, config=config, module_filter_fn=lambda m, name: name.startswith("mlp"))
tables = torch.optim.SparseAdam([net.user.weight, net.ad.weight], lr=1e-2)
dense = torch.optim.Adam([*net.mlp.parameters(), *net.out.parameters()], lr=2e-3)
losses = []
for step in range(STEPS):
    user = torch.multinomial(active, BATCH, replacement=True)
    ad = torch.multinomial(popular, BATCH, replacement=True)
    chance = torch.sigmoid(quality[ad] + habit[user] - 4.2)
    # on some days a campaign runs: everybody clicks more
    if step % 37 > 33:
        chance = chance.sqrt()
    clicked = torch.bernoulli(chance)
    loss = nn.functional.binary_cross_entropy_with_logits(net(user, ad), clicked)
    tables.zero_grad()
    dense.zero_grad()
    loss.backward()
    tables.step()
    dense.step()
    losses.append(loss.item())
    if step % 20 == 0:
        print(f"step {step} loss {losses[-1]:.4f}")
print(f"final loss {sorted(losses[-21:])[10]:.4f}")
