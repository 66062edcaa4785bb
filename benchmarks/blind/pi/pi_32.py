"""A linear probe and adapter on a frozen backbone in torchao's float8: python pi_32.py good|bad [plain]."""

import sys

import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

MODE = sys.argv[1]
PLAIN = "plain" in sys.argv[2:]
STEPS = 120

torch.manual_seed(32)
backbone = nn.Sequential(
    nn.Linear(48, 128), nn.LayerNorm(128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 128), nn.LayerNorm(128), nn.GELU()
)
backbone.requires_grad_(False).eval()
head = nn.Sequential(nn.Linear(128, 64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, 12))
model = nn.Sequential(backbone, head)
if not PLAIN:
    config = Float8LinearConfig.from_recipe_name("rowwise")
    config = Float8LinearConfig(
        cast_config_input=config.cast_config_input,
        cast_config_weight=config.cast_config_weight,
        cast_config_grad_output=config.cast_config_grad_output,
        emulate=True,
    )
    convert_to_float8_training(model, config=config, module_filter_fn=lambda m, name: name != "1.3")
optimizer = torch.optim.AdamW(head.parameters(), lr=3e-3)
centres = torch.randn(12, 48)
losses = []
for _ in range(STEPS):
    y = torch.randint(12, (64,))
    x = centres[y] + 1.8 * torch.randn(64, 48)
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss {sum(losses[-10:]) / 10:.4f}")
