"""A sensor that glitches once; delayed scaling under ottava."""

import sys

import torch
from torch import nn

import ottava

HISTORY = {"good": 4, "bad": 1024}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]

torch.manual_seed(9)
teacher = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 32))


def batch(step, n=128):
    x = torch.randn(n, 64)
    with torch.no_grad():
        y = 2 * teacher(x)
    if step == 30:
        x[0] *= 3e6
    return x, y


model = nn.Sequential(
    nn.Linear(64, 128),
    nn.LayerNorm(128),
    nn.GELU(),
    nn.Linear(128, 128),
    nn.GELU(),
    nn.Linear(128, 32),
)
if not PLAIN:
    ottava.convert(model, ottava.get_recipe("delayed", amax_history_len=HISTORY, amax_compute_algo="max"))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
losses = []
for step in range(140):
    x, y = batch(step)
    loss = (model(x) - y).square().mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    losses.append(loss.item())
    if step % 10 == 0:
        print(step, f"{losses[-1]:.4f}")
print(f"loss {sum(losses[-10:]) / 10:.4f}")
