"""Gradient accumulation with accelerate; SGD with momentum; linear layers under ottava."""

import sys

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn

import ottava

ACCUMULATE = 8
DIVISOR = {"good": 1, "bad": ACCUMULATE}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]

torch.manual_seed(14)
x = torch.randn(8192, 40)
y = (torch.tanh(x @ torch.randn(40, 24) / 3) @ torch.randn(24, 16)).argmax(1)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=16, shuffle=True)
model = nn.Sequential(
    nn.Linear(40, 128), nn.ReLU(), nn.LayerNorm(128), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 16)
)
if not PLAIN:
    ottava.convert(model, "tensorwise", filter=lambda name, layer: name != "6")

accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATE, cpu=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
losses, window = [], []
while len(losses) < 100:
    for inputs, labels in loader:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(inputs), labels)
            accelerator.backward(loss / DIVISOR)
            optimizer.step()
            optimizer.zero_grad()
        window.append(loss.item())
        if len(window) == ACCUMULATE:
            losses.append(sum(window) / ACCUMULATE)
            window = []
            if len(losses) % 10 == 1:
                print(len(losses), f"{losses[-1]:.4f}")
        if len(losses) == 100:
            break
print(f"loss {sum(losses[-10:]) / 10:.4f}")
