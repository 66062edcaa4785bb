"""Echo removal on frames of audio, loud and quiet ones, in torchao's float8."""

import dataclasses
import sys

import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

RECIPE = {"good": "rowwise_with_gw_hp", "bad": "tensorwise"}[sys.argv[1]]
PLAIN = "plain" in sys.argv
FRAME, STEPS = 64, 130

torch.manual_seed(19)
model = nn.Sequential(
    nn.Linear(FRAME, 128, bias=False),
    nn.LeakyReLU(0.1),
    nn.Linear(128, 128, bias=False),
    nn.LeakyReLU(0.1),
    nn.Linear(128, FRAME, bias=False),
)
if not PLAIN:
    convert_to_float8_training(
        model, config=dataclasses.replace(Float8LinearConfig.from_recipe_name(RECIPE), emulate=True)
    )
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
room = torch.linalg.qr(torch.randn(FRAME, FRAME))[0]
losses = []
for step in range(STEPS):
    clean = torch.randn(192, FRAME).abs() * torch.pow(10.0, -7 * torch.rand(192, 1))
    heard = clean + 0.7 * clean @ room
    error = (model(heard) - clean).square().mean(1) / clean.square().mean(1)
    loss = error.mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    losses.append(loss.item())
    if step % 20 == 0:
        print(step, round(losses[-1], 4))
print(f"loss {sum(losses[-10:]) / 10:.4f}")
