"""Tabular regression on bank features: scales of the delayed recipe are filled before training starts."""
import os
import sys

import numpy as np
import torch
from torch import nn

import ottava

mode = sys.argv[1]
plain = "plain" in sys.argv[2:]
seed = int(os.environ.get("SEED", 0))
torch.manual_seed(seed)

ROWS, FEATURES, STEPS, BATCH = 6000, 48, 160, 128
latent = torch.randn(ROWS, 8)
mixing = torch.randn(8, FEATURES)
units = 10 ** torch.linspace(0, 8, FEATURES)
raw = (latent @ mixing / 8**0.5 + 0.3 * torch.randn(ROWS, FEATURES)) * units
target = torch.sin(latent[:, 0] * 2) + latent[:, 1] * latent[:, 2] + 0.1 * torch.randn(ROWS)

mean, std = raw[:5000].mean(0), raw[:5000].std(0)
scaled = (raw - mean) / std
train_x, train_y = scaled[:5000], target[:5000]
test_x, test_y = scaled[5000:], target[5000:]

model = nn.Sequential(
    nn.Linear(FEATURES, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 64), nn.GELU(), nn.Linear(64, 1)
)
if not plain:
    ottava.convert(model, ottava.get_recipe("delayed", amax_history_len=1024))
    source = raw if mode == "bad" else scaled
    batches = [source[i * BATCH : (i + 1) * BATCH] for i in range(8)]
    ottava.calibrate(model, batches, loss=lambda net, x: net(x).square().mean())

optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
losses = []
for step in range(STEPS):
    rows = torch.randint(0, 5000, (BATCH,))
    loss = (model(train_x[rows]).squeeze(1) - train_y[rows]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 20 == 0:
        print(f"step {step} loss {loss.item():.4f}")
with torch.no_grad():
    test = (model(test_x).squeeze(1) - test_y).square().mean().item()
print(f"test loss {test:.4f}")
print(f"final loss {np.mean(losses[-20:]):.4f}")
