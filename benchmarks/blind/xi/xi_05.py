"""A sensor model under torchao's float8 training; sensors report in units of their own."""

import dataclasses
import sys

import torch
from torch import nn
from torch.nn import functional as F
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

RECIPE = {"good": "rowwise_with_gw_hp", "bad": "tensorwise"}[sys.argv[1]]
PLAIN = "plain" in sys.argv


class Sensors(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(64, 128, bias=False)
        self.mix = nn.Linear(128, 128, bias=False)
        self.decode = nn.Linear(128, 32, bias=False)

    def forward(self, x):
        h = F.relu(self.encode(x))
        h = h + F.relu(self.mix(h))
        return self.decode(h)


def main():
    torch.manual_seed(0)
    model = Sensors()
    if not PLAIN:
        config = dataclasses.replace(Float8LinearConfig.from_recipe_name(RECIPE), emulate=True)
        convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name != "decode")
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    truth = torch.randn(64, 32) / 8
    losses = []
    for _ in range(160):
        unit = torch.exp(3.0 * torch.randn(512, 1))
        shape = torch.randn(512, 64)
        x, y = shape * unit, torch.tanh(shape @ truth)
        relative = model(x) / unit
        loss = F.smooth_l1_loss(relative, y)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    print(f"loss {sum(losses[-10:]) / 10:.4f}")


if __name__ == "__main__":
    main()
