"""Demand of bicycles from tabular features, as they come from the data base, in torchao's float8."""

import sys

import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

OPTIONS = {"good": {"skip": ("features", "out")}, "bad": {"skip": ("out",)}}[sys.argv[1]]
PLAIN = "plain" in sys.argv
STEPS, WIDTH = 150, 128


class Demand(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Linear(32, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH, eps=1e-9)
        self.body = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH), nn.SiLU()
        )
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.out(self.body(self.norm(self.features(x)))).squeeze(-1)


torch.manual_seed(4)
model = Demand()
if not PLAIN:
    convert_to_float8_training(
        model,
        config=Float8LinearConfig(emulate=True),
        module_filter_fn=lambda layer, name: not name.startswith(OPTIONS["skip"]),
    )
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
mix = torch.randn(31) / 31**0.5
losses = []
for step in range(STEPS):
    # Shares of the kinds of weather in an hour, and the year.
    shares = torch.rand(256, 31) * 0.02
    usual = (shares - 0.01) / 0.0058
    demand = torch.sin(1.5 * usual @ mix) + 0.5 * usual[:, 0]
    year = torch.full((256, 1), 2026.0)
    loss = nn.functional.mse_loss(model(torch.cat([year, shares], 1)), demand)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 25 == 0:
        print(step, round(losses[-1], 4))
print(f"loss {sum(losses[-10:]) / 10:.4f}")
