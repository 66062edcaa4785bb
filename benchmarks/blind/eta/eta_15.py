"""Regression on padded sequences of features with delayed scaling."""

import sys

import torch
from torch import nn

import ottava

mode, plain = sys.argv[1], "plain" in sys.argv
torch.manual_seed(20)
B, T, FEATURES = 24, 16, 64
teacher = nn.Sequential(nn.Linear(FEATURES, 64), nn.Tanh(), nn.Linear(64, 32))
model = nn.Sequential(
    nn.Linear(FEATURES, 128), nn.LayerNorm(128), nn.GELU(), nn.Linear(128, 128), nn.LayerNorm(128), nn.GELU(),
    nn.Linear(128, 32)
)  # fmt: skip
if not plain:
    recipe = ottava.get_recipe("delayed", amax_history_len=4 if mode == "good" else 1024)
    print(ottava.convert(model, recipe))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
losses = []
for step in range(150):
    lengths = torch.randint(6, T, (B, 1))
    real = torch.arange(T) < lengths
    x = torch.randn(B, T, FEATURES)
    with torch.no_grad():
        y = 3 * teacher(x)
    if step == 12:
        x[~real] *= 3e7
    loss = (model(x) - y).square().mean(-1)[real].mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 20 == 0:
        print(f"step {step} loss {losses[-1]:.4f}")
print(f"loss {sum(losses[-20:]) / 20:.4f}")
