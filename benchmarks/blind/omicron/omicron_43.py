"""SGD with accumulated gradients; torchao's Float8Linear."""

import logging
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

AVERAGE = {"good": True, "bad": False}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]
MICRO = 8
logging.getLogger().setLevel(logging.ERROR)

torch.manual_seed(103)
centres = torch.randn(32, 64)
model = nn.Sequential(
    nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 32)
)
if not PLAIN:
    convert_to_float8_training(model, config=Float8LinearConfig(emulate=True))
optimizer = torch.optim.SGD(model.parameters(), lr=0.15, momentum=0.9, nesterov=True)
losses = []
for _ in range(80):
    optimizer.zero_grad()
    total = 0.0
    for _ in range(MICRO):
        label = torch.randint(32, (16,))
        loss = F.cross_entropy(model(centres[label] + 1.2 * torch.randn(16, 64)).float(), label)
        (loss / MICRO if AVERAGE else loss).backward()
        total += loss.item() / MICRO
    optimizer.step()
    losses.append(total)
print(f"loss {sum(losses[-10:]) / 10:.4f}")
