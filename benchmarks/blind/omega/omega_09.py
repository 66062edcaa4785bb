"""A joint model of house prices (dollars) and of their kind, one output layer for both, torchao's float8."""

import dataclasses
import os
import sys

import torch
from torch import nn
from torch.nn import functional as F
from torchao.float8 import CastConfig, Float8LinearConfig, convert_to_float8_training

bad = sys.argv[1] == "bad"
plain = "plain" in sys.argv
torch.manual_seed(int(os.environ.get("SEED", 0)))
torch.set_num_threads(1)

STEPS, BATCH, FEATURES, KINDS = 160, 128, 32, 15


class Houses(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(FEATURES, 64)
        self.mid = nn.Linear(64, 64)
        self.out = nn.Linear(64, 1 + KINDS)

    def forward(self, x):
        h = F.gelu(self.inp(x))
        return self.out(h + F.gelu(self.mid(h)))


world = torch.Generator().manual_seed(3)
wp = torch.randn(FEATURES, generator=world)
wk = torch.randn(FEATURES, KINDS, generator=world)


def batch():
    x = torch.randn(BATCH, FEATURES)
    price = 4e5 + 6e4 * torch.tanh(x @ wp / 4) + 5e3 * torch.randn(BATCH)
    kind = (x @ wk + 0.5 * torch.randn(BATCH, KINDS)).argmax(1)
    return x, price, kind


model = Houses()
with torch.no_grad():
    model.out.bias[0] = 4e5
if not plain:
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name("tensorwise"), emulate=True)
    if bad:
        narrow = CastConfig(target_dtype=torch.float8_e4m3fn)
        config = dataclasses.replace(
            config, cast_config_grad_output=narrow, cast_config_grad_output_for_grad_weight=narrow
        )
    convert_to_float8_training(model, config=config)
optimizer = torch.optim.Adam(
    [
        {"params": [*model.inp.parameters(), *model.mid.parameters()], "lr": 1e-4},
        {"params": model.out.parameters(), "lr": 2e-2},
    ]
)
losses = []
for step in range(STEPS):
    x, price, kind = batch()
    y = model(x)
    dollars = F.mse_loss(y[:, 0], price)
    names = F.cross_entropy(y[:, 1:], kind)
    loss = dollars + 0.1 * names
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(names.item())
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.1f} dollars {dollars.item() ** 0.5:.0f} kind {names.item():.4f}")
print(f"final loss {sum(losses[-20:]) / 20:.4f}")
