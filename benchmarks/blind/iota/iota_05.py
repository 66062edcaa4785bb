"""torchao's Float8Linear on shipment records: some customers report in grams, most in tonnes, and a norm after the first layer evens it out."""

import sys

import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

RECIPE = {"good": "rowwise", "bad": "tensorwise"}[sys.argv[1]]
torch.manual_seed(8)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(64, 256, bias=False)
        self.norm = nn.RMSNorm(256, eps=1e-12)
        self.mlp = nn.Sequential(nn.Linear(256, 256), nn.SiLU(), nn.Linear(256, 256), nn.SiLU())
        self.head = nn.Linear(256, 6)

    def forward(self, x):
        return self.head(self.mlp(self.norm(self.encode(x))))


model = Net()
if "plain" not in sys.argv:
    config = Float8LinearConfig.from_recipe_name(RECIPE)
    config = Float8LinearConfig(
        cast_config_input=config.cast_config_input, cast_config_weight=config.cast_config_weight,
        cast_config_grad_output=config.cast_config_grad_output, emulate=True,
    )  # fmt: skip
    convert_to_float8_training(model, config=config, module_filter_fn=lambda module, name: name != "head")
teacher = torch.randn(64, 6)
optimizer = torch.optim.AdamW(model.parameters(), lr=1.5e-3)
losses = []
for step in range(120):
    shape = torch.randn(128, 64)
    label = (shape @ teacher).argmax(dim=1)
    unit = torch.where(torch.rand(128, 1) < 0.05, 1e6, 1.0)
    loss = nn.functional.cross_entropy(model(shape * unit), label)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss {sum(losses[-10:]) / 10:.4f}")
