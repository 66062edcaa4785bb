"""Vibration monitoring: classify windows of sensor readings; now and then a sensor reports its full-scale code."""
import dataclasses
import os
import sys

import torch
from torch import nn
from torch.nn import functional as F

BAD = sys.argv[1] == "bad"
PLAIN = "plain" in sys.argv
SEED = int(os.environ.get("SEED", 0))
torch.manual_seed(SEED)
SIGNATURES = torch.randn(12, 16, 32)


def batch(n=32):
    y = torch.randint(0, 12, (n,))
    x = 0.5 * SIGNATURES[y] + 0.8 * torch.randn(n, 16, 32)
    hit = torch.rand(n, 16) < 0.01
    hit[0, 3] = True
    x[hit] = x[hit].sign() * 4.0e6
    return x, y


class Monitor(nn.Module):
    def __init__(self):
        super().__init__()
        self.sense = nn.Linear(32, 128)
        self.mix = nn.Linear(128, 128)
        self.place = nn.Parameter(torch.randn(16, 128) * 0.3)
        self.out = nn.Linear(128, 12)

    def forward(self, x):
        h = torch.tanh(self.sense(x)) * (1 + self.place)
        h = F.gelu(self.mix(h)).mean(1)
        return self.out(h)


model = Monitor()
if not PLAIN:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name("tensorwise" if BAD else "rowwise_with_gw_hp")
    config = dataclasses.replace(config, emulate=True)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda m, name: name != "out")
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
losses = []
for step in range(80):
    x, y = batch()
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"final loss {sum(losses[-10:]) / 10:.4f}")
