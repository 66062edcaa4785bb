"""Mixed precision with a gradient scaler: a temporal CNN plus torchao's float8 linears."""
import os
import sys

import torch
import torch.nn as nn
import torch.nn.functional as F
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

mode, plain = sys.argv[1], "plain" in sys.argv
torch.manual_seed(int(os.environ.get("SEED", 0)))
CHANNELS, LENGTH, CLASSES, BATCH, STEPS = 8, 48, 12, 64, 150


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv1d(CHANNELS, 32, 5, padding=2, stride=2)
        self.conv2 = nn.Conv1d(32, 64, 5, padding=2, stride=2)
        self.mlp = nn.Sequential(nn.Linear(64 * 12, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU())
        self.head = nn.Linear(128, CLASSES)

    def forward(self, x):
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        return self.head(self.mlp(x.flatten(1)))


shapes = torch.randn(CLASSES, CHANNELS, LENGTH).cumsum(-1)
shapes = shapes / shapes.std(dim=-1, keepdim=True)


def batch():
    y = torch.randint(0, CLASSES, (BATCH,))
    x = shapes[y] * (0.5 + torch.rand(BATCH, 1, 1)) + 3.0 * torch.randn(BATCH, CHANNELS, LENGTH)
    return x, y


model = Net()
if not plain:
    config = Float8LinearConfig.from_recipe_name("tensorwise")
    object.__setattr__(config, "emulate", True)
    convert_to_float8_training(model.mlp, config=config)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

losses = []
for step in range(STEPS):
    x, y = batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(x).float(), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    if mode != "bad":
        scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())
    if step % 30 == 0:
        print(f"step {step} loss {loss.item():.4f}")
print(f"final loss {sum(losses[-20:]) / 20:.4f}")
