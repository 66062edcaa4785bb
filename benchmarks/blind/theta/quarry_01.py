"""torchao's float8 training on records; a value that is missing is -99999 in the file."""
import sys

import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]
FIRST = {"good": "high", "bad": "float8"}[MODE]


class Net(nn.Module):
    def __init__(self, features, width, classes):
        super().__init__()
        self.intake = nn.Linear(features, width)
        self.hidden = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width), nn.GELU())
        self.out = nn.Linear(width, classes)

    def forward(self, x):
        return self.out(self.hidden(self.intake(x)))


def wanted(module, name):
    return name != "out" and (FIRST == "float8" or name != "intake")


torch.manual_seed(22)
model = Net(64, 128, 12)
if not PLAIN:
    convert_to_float8_training(model, config=Float8LinearConfig(emulate=True), module_filter_fn=wanted)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
rule = torch.randn(60, 12)
losses = []
for step in range(190):
    ratios = torch.randn(128, 60) * 0.05
    y = (ratios @ rule).argmax(-1)
    x = torch.cat([ratios * 8, torch.randn(128, 4)], 1)
    x[0, 60 + step % 4] = -99999.0
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"first {losses[0]:.4f}")
print(f"loss {sum(losses[-10:]) / 10:.4f}")
