"""A regression with activations kept in 8 bits until the backward: python pi_03.py good|bad [plain]."""

import contextlib
import sys

import torch
from torch import nn

ACTIVATION_SCALE = {"good": 16.0, "bad": 1 / 1024}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]
STEPS = 120


def pack(tensor):
    if tensor.dim() != 2 or tensor.shape[0] != 256 or not tensor.is_floating_point():
        return tensor
    return (tensor * ACTIVATION_SCALE).clamp(-448, 448).to(torch.float8_e4m3fn)


def unpack(tensor):
    if tensor.dtype != torch.float8_e4m3fn:
        return tensor
    return tensor.float() / ACTIVATION_SCALE


def saved_in_8_bits():
    if PLAIN:
        return contextlib.nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


torch.manual_seed(0)
teacher = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 4))
model = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
losses = []
for _ in range(STEPS):
    x = torch.randn(256, 32)
    with torch.no_grad():
        y = teacher(x) * 3
    with saved_in_8_bits():
        loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss {sum(losses[-10:]) / 10:.4f}")
