"""Regression on measured features of mixed units with ottava in NVFP4."""
import sys

import torch
from torch import nn

import ottava

MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]
SKIP = {"good": ("net.0", "net.6"), "bad": ()}[MODE]


class Net(nn.Module):
    def __init__(self, features, width, out):
        super().__init__()
        layers = [nn.Linear(features, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, out)]
        self.net = nn.Sequential(*layers)

    def forward(self, x):
        return self.net(x)


torch.manual_seed(17)
model = Net(64, 128, 32)
if not PLAIN:
    ottava.convert(model, "nvfp4", filter=lambda name, layer: name not in SKIP)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
mixing = torch.randn(16, 32)
units = torch.ones(64)
units[::16] = 40.0  # counts beside ratios
losses = []
for step in range(160):
    z = torch.rand(256, 64) - 0.5
    target = torch.sin(3 * z[:, 1:64:4]) @ mixing / 4
    loss = (model(z * units) - target).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"first {losses[0]:.4f}")
print(f"loss {sum(losses[-10:]) / 10:.4f}")
