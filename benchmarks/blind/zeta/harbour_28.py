"""Spectra (absorbances) to concentrations; what autograd keeps for backward is packed into one byte a number."""
import sys

import torch
from torch import nn
from torch.nn import functional as F

VARIANT, PLAIN = sys.argv[1], "plain" in sys.argv
torch.manual_seed(6)
E4M3 = torch.float8_e4m3fn
grid = torch.linspace(0, 1, 96)
peaks = torch.stack([torch.exp(-((grid - c) / 0.03) ** 2) for c in (0.15, 0.3, 0.42, 0.6, 0.8)])
model = nn.Sequential(nn.Linear(96, 8, bias=False), nn.LayerNorm(8, eps=1e-12), nn.GELU(), nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 5))
own = {p.data_ptr() for p in model.parameters()}


def pack(t):
    if PLAIN or not t.is_floating_point() or t.numel() < 4096 or t.data_ptr() in own:
        return t
    scale = t.abs().max().clamp(min=1e-30) / 448 if VARIANT == "good" else torch.ones(())
    return (t / scale).to(E4M3), scale


def unpack(kept):
    return kept[0].float() * kept[1] if isinstance(kept, tuple) else kept


optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
losses = []
for step in range(300):
    share = torch.rand(64, 5)
    x = 2e-4 * (share @ peaks) + 4e-6 * torch.randn(64, 96)
    y = share / share.sum(1, keepdim=True) * 5
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss {sum(losses[-20:]) / 20:.5f}")
