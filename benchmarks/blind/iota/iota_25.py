"""All of the model in one dtype, to save memory, with a careful learning rate; FP8 per row."""

import sys

import torch
from torch import nn
from torch.nn import functional as F

import ottava

DTYPE = {"good": torch.float32, "bad": torch.bfloat16}[sys.argv[1]]
torch.manual_seed(103)
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 20))
for layer in model:
    if isinstance(layer, nn.Linear):
        nn.init.normal_(layer.weight, std=1.6 / layer.in_features**0.5)
model = model.to(DTYPE)
if "plain" not in sys.argv:
    ottava.convert(model, "rowwise")
centres = torch.randn(20, 64)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, weight_decay=0.01)
losses = []
for step in range(220):
    label = torch.randint(0, 20, (128,))
    x = (0.8 * centres[label] + torch.randn(128, 64)).to(DTYPE)
    loss = F.cross_entropy(model(x).float(), label)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss {sum(losses[-10:]) / 10:.4f}")
