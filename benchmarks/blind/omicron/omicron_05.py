"""A convolutional classifier of noisy patterns: SGD, autocast with a GradScaler, FP8 in the linear layers."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

import ottava

parser = argparse.ArgumentParser()
parser.add_argument("mode", choices=["good", "bad"])
parser.add_argument("precision", nargs="?", default="fp8")
args = parser.parse_args()
UNSCALE_FIRST = {"good": True, "bad": False}[args.mode]
LOW = args.precision != "plain"

torch.manual_seed(2)
patterns = torch.randn(10, 1, 12, 12)
model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
    nn.Linear(288, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10),
)  # fmt: skip
if LOW:
    ottava.convert(model, "tensorwise")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
losses = []
for _ in range(150):
    label = torch.randint(10, (64,))
    image = patterns[label] + 0.8 * torch.randn(64, 1, 12, 12)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=LOW):
        loss = F.cross_entropy(model(image).float(), label)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    if UNSCALE_FIRST:
        scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())
print(f"loss {sum(losses[-10:]) / 10:.4f}")
