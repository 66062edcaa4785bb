"""One trunk, one fused output layer: 8 pressures under a stiff physics term beside a class of 56."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

import ottava
from models import MLP

recipe = {"good": "tensorwise", "bad": "tensorwise_e4m3"}[sys.argv[1]]
STIFF = 3e7  # as in the pressure solver, which counts in pascal
torch.manual_seed(16)
teacher_class, teacher_pressure = torch.randn(32, 56), torch.randn(32, 8) / 32**0.5
trunk, heads = MLP(32, 96, 64, norm=True), nn.Linear(64, 8 + 56)
model = nn.ModuleDict({"trunk": trunk, "heads": heads})
ottava.convert(model, recipe)
opt = torch.optim.AdamW(model.parameters(), lr=4e-3)
for step in range(80):
    x = torch.randn(256, 32)
    pressure, klass = x @ teacher_pressure, (x @ teacher_class).argmax(-1)
    out = heads(F.gelu(trunk(x)))
    physics = (out[:, :8] - pressure).square().mean()
    ce = F.cross_entropy(out[:, 8:], klass)
    loss = STIFF * physics + ce
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 10 == 9:
        print(f"step {step} loss {loss.item():.1f} physics {physics.item():.4f} class {ce.item():.4f}", flush=True)
