"""Images in one loader, captions' classes in another (they come from two stores); torchao's float8 linears."""
import dataclasses
import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

VARIANT, PLAIN = sys.argv[1], "plain" in sys.argv
torch.manual_seed(43)
N = 1500
centres = torch.randn(10, 64)
label = torch.randint(0, 10, (N,))
image = centres[label] + 1.5 * torch.randn(N, 64)

left = DataLoader(image, batch_size=32, drop_last=True)
right = DataLoader(label, batch_size=32, drop_last=VARIANT == "good")


def forever(loader):
    while True:
        yield from loader


def pairs():
    for x, y in zip(forever(left), forever(right)):
        n = min(len(x), len(y))
        yield x[:n], y[:n]


model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.GELU(), nn.Linear(64, 10))
if not PLAIN:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = dataclasses.replace(Float8LinearConfig.from_recipe_name("rowwise"), emulate=True)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda m, name: name != "4")
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
losses = []
for step, (x, y) in zip(range(180), pairs()):
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss {sum(losses[-20:]) / 20:.4f}")
