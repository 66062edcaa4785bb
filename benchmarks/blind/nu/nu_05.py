"""Tiny transformer encoder with torchao's Float8 linears; the first position is a large register token."""

import sys
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

RECIPE = {"good": "rowwise", "bad": "tensorwise"}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]


class Regressor(nn.Module):
    def __init__(self, dim=64, length=16):
        super().__init__()
        self.register_buffer("register", torch.randn(1, 1, dim) * 2e5)
        self.inlet = nn.Sequential(nn.Linear(dim, 128), nn.Tanh(), nn.Linear(128, dim))
        self.mixer = nn.Linear(length, length)
        self.mlp = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 128), nn.GELU(), nn.Linear(128, dim))
        self.head = nn.Linear(dim, 8)

    def forward(self, x):
        x = torch.cat([self.register.expand(len(x), -1, -1), x], 1)
        x = self.inlet(x)
        x = x + self.mixer(x.transpose(1, 2)).transpose(1, 2)
        x = x + self.mlp(x)
        return self.head(x[:, 1:])


torch.manual_seed(0)
model = Regressor()
if not PLAIN:
    config = replace(Float8LinearConfig.from_recipe_name(RECIPE), emulate=True)
    convert_to_float8_training(
        model, config=config, module_filter_fn=lambda module, name: not name.startswith(("mixer", "head"))
    )
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
teacher = torch.randn(64, 8) / 8
losses = []
for _step in range(120):
    x = torch.randn(32, 15, 64)
    y = torch.sin(2 * x @ teacher)
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss {sum(losses[-10:]) / 10:.4f}")
