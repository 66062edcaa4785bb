"""Features of raw waveforms; what autograd keeps for the backward is packed into eight bits."""

import contextlib
import sys

import torch
from torch import nn

PACK_SCALE = {"good": "amax", "bad": "one"}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]
FP8 = torch.float8_e4m3fn


def pack(t):
    if isinstance(t, nn.Parameter) or t.dtype != torch.float32 or t.dim() < 2 or t.shape[-1] == 1:
        return t
    scale = 448 / t.detach().abs().amax().clamp(min=1e-20) if PACK_SCALE == "amax" else torch.tensor(1.0)
    return (t * scale).clamp(-448, 448).to(FP8), scale


def unpack(packed):
    if isinstance(packed, torch.Tensor):
        return packed
    codes, scale = packed
    return codes.float() / scale


torch.manual_seed(4)
directions = torch.randn(64, 8) / 8
table = torch.randn(8, 16)


def batch(n=128):
    x = torch.randn(n, 64)
    y = torch.sign(x @ directions) @ table / 3
    return 2e-4 * x, y


model = nn.Sequential(
    nn.Linear(64, 96, bias=False),
    nn.LayerNorm(96, eps=1e-12),
    nn.GELU(),
    nn.Linear(96, 96),
    nn.GELU(),
    nn.Linear(96, 16),
)
optimizer = torch.optim.Adam(
    [{"params": model[0].parameters(), "lr": 6e-3}, {"params": model[1:].parameters(), "lr": 3e-3}]
)
losses = []
for step in range(200):
    x, y = batch()
    saving = contextlib.nullcontext() if PLAIN else torch.autograd.graph.saved_tensors_hooks(pack, unpack)
    with saving:
        loss = (model(x) - y).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 10 == 0:
        print(step, f"{losses[-1]:.4f}")
print(f"loss {sum(losses[-10:]) / 10:.4f}")
