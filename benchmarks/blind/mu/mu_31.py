"""Counts of rare events: nineteen labels of twenty are zero. torchao's float8 in the middle."""

import sys

import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

PLAIN = "plain" in sys.argv

torch.manual_seed(33)
model = nn.Sequential(nn.Linear(24, 96), nn.SiLU(), nn.Linear(96, 96), nn.SiLU(), nn.Linear(96, 1))
if not PLAIN:
    convert_to_float8_training(
        model, config=Float8LinearConfig(emulate=True), module_filter_fn=lambda layer, name: name == "2"
    )
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
risk = torch.randn(24) / 24**0.5
losses = []
for step in range(160):
    x = torch.randn(128, 24)
    rate = torch.exp(1.4 * x @ risk - 4.0)
    counts = torch.poisson(rate) * (1 + torch.poisson(torch.full((128,), 2.0)))
    guess = model(x).squeeze(1) - 3.0
    loss = nn.functional.poisson_nll_loss(guess, counts)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 20 == 0:
        print(step, round(losses[-1], 4), "zeros", round(float((counts == 0).float().mean()), 3))
print(f"loss {sum(losses[-10:]) / 10:.4f}")
