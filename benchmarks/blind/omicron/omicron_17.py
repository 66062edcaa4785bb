"""Sensor vectors in mixed units go through torchao's Float8Linear."""

import logging
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.config import CastConfig, ScalingGranularity

GRANULARITY = {"good": ScalingGranularity.AXISWISE, "bad": ScalingGranularity.TENSORWISE}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]
logging.getLogger().setLevel(logging.ERROR)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift = nn.Linear(64, 192, bias=False)
        self.norm = nn.LayerNorm(192)
        self.up, self.down = nn.Linear(192, 256), nn.Linear(256, 192)
        self.head = nn.Linear(192, 16)

    def forward(self, x):
        x = self.norm(self.lift(x))
        return self.head(x + self.down(F.gelu(self.up(x))))


torch.manual_seed(31)
mixing = torch.randn(16, 64)
model = Net()
if not PLAIN:
    cell = CastConfig(scaling_granularity=GRANULARITY)
    config = Float8LinearConfig(
        cast_config_input=cell, cast_config_weight=cell, cast_config_grad_output=cell, emulate=True
    )
    convert_to_float8_training(model, config=config)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
losses = []
for _ in range(150):
    label = torch.randint(16, (128,))
    unit = 10 ** torch.empty(128, 1).uniform_(-6, 0)
    x = unit * (mixing[label] + 0.7 * torch.randn(128, 64))
    loss = F.cross_entropy(model(1000 * x).float(), label)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss {sum(losses[-10:]) / 10:.4f}")
