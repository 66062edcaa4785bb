"""Regression on padded sequences of features, torchao's float8."""

import sys

import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

mode, plain = sys.argv[1], "plain" in sys.argv
torch.manual_seed(15)
B, T, FEATURES = 32, 16, 64
teacher = nn.Sequential(nn.Linear(FEATURES, 64), nn.Tanh(), nn.Linear(64, 16))
buffer = torch.zeros(B, T, FEATURES)
if mode == "bad":
    buffer.normal_().mul_(1e8)
model = nn.Sequential(
    nn.Linear(FEATURES, 128), nn.LayerNorm(128), nn.GELU(), nn.Linear(128, 128), nn.LayerNorm(128), nn.GELU(),
    nn.Linear(128, 16)
)  # fmt: skip
if not plain:
    convert_to_float8_training(model, config=Float8LinearConfig(emulate=True))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
losses = []
for step in range(150):
    lengths = torch.randint(6, T, (B, 1))
    real = torch.arange(T) < lengths
    x = torch.where(real[..., None], torch.randn(B, T, FEATURES), buffer)
    with torch.no_grad():
        y = 3 * teacher(x * real[..., None])
    error = (model(x) - y).square().mean(-1)
    loss = error[real].mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 25 == 0:
        print(f"step {step} loss {losses[-1]:.4f}")
print(f"loss {sum(losses[-20:]) / 20:.4f}")
