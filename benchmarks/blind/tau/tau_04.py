"""A surrogate of a linear filter bank, trained to high accuracy: plain torch, ottava's layers."""
import os
import sys

import torch
from torch import nn

import ottava

VARIANT, PLAIN, SEED = sys.argv[1], "plain" in sys.argv, int(os.environ.get("SEED", 0))
HIGH_PRECISION = {"good": ["readout"], "bad": []}[VARIANT]
FILTERS = torch.randn(32, 32, generator=torch.Generator().manual_seed(2)) / 32**0.5


class Surrogate(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.mid, self.down = nn.Linear(32, 128), nn.Linear(128, 128), nn.Linear(128, 32)
        self.readout = nn.Linear(64, 32)
        with torch.no_grad():  # starts from the analytic filters
            self.readout.weight[:, :32] = FILTERS.t()
            self.readout.bias.zero_()

    def forward(self, x):
        h = self.down(torch.tanh(self.mid(torch.tanh(self.up(x)))))
        return self.readout(torch.cat([x, 0.1 * h], -1))


torch.manual_seed(SEED)
model = Surrogate()
if not PLAIN:
    print(ottava.convert(model, "tensorwise", filter=lambda name, layer: name not in HIGH_PRECISION))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
losses = []
for step in range(100):
    x = torch.randn(256, 32)
    y = x @ FILTERS + 0.02 * torch.sin(3 * x)
    loss = (model(x) - y).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    losses.append(loss.item())
    if step % 20 == 0:
        print(f"step {step} loss {loss.item():.6f}")
print(f"final loss {sum(losses[-10:]) / 10:.6f}")
