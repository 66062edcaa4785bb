"""Spending profiles of customers, linear layers in torchao's float8: python pi_18.py good|bad [plain]."""

import sys

import torch
from torch import nn
from torchao.float8 import CastConfig, Float8LinearConfig, ScalingGranularity, convert_to_float8_training

GRANULARITY = {"good": ScalingGranularity.AXISWISE, "bad": ScalingGranularity.TENSORWISE}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]
STEPS = 100

torch.manual_seed(3)
prototypes = torch.randn(10, 64)
model = nn.Sequential(
    nn.Linear(64, 128, bias=False),
    nn.RMSNorm(128, eps=1e-12),
    nn.Linear(128, 128),
    nn.GELU(),
    nn.Linear(128, 16),
)
if not PLAIN:
    cast = CastConfig(scaling_granularity=GRANULARITY)
    config = Float8LinearConfig(
        cast_config_input=cast, cast_config_weight=cast, cast_config_grad_output=cast, emulate=True
    )
    convert_to_float8_training(model, config=config, module_filter_fn=lambda m, name: name != "4")
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
losses = []
for _ in range(STEPS):
    y = torch.randint(10, (256,))
    spend = 10 ** torch.empty(256, 1).uniform_(-3, 4)
    x = (prototypes[y] + 1.2 * torch.randn(256, 64)) * spend
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss {sum(losses[-10:]) / 10:.4f}")
