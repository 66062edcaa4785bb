"""Counts of events in 32 channels (Poisson regression), gradients clipped by a home-made global norm."""
import sys

import torch
from torch import nn
from torch.nn import functional as F

import ottava

VARIANT, PLAIN = sys.argv[1], "plain" in sys.argv
torch.manual_seed(59)
NORM_TYPE = {"good": torch.float32, "bad": torch.float16}[VARIANT]
model = nn.Sequential(nn.Linear(48, 128), nn.SiLU(), nn.Linear(128, 128), nn.SiLU(), nn.Linear(128, 32))
if not PLAIN:
    print(ottava.convert(model, "tensorwise"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
plan = torch.randn(48, 32) / 7


@torch.no_grad()
def clip(params, most):
    grads = [p.grad for p in params]
    total = sum(g.to(NORM_TYPE).square().sum() for g in grads).sqrt()
    factor = (most / (total + 1e-6)).clamp(max=1.0)
    for g in grads:
        g *= factor.to(g.dtype)
    return float(total)


losses = []
for step in range(300):
    x = torch.randn(64, 48)
    count = torch.poisson(torch.exp(1.5 + torch.sin(2 * x @ plan)))
    loss = F.poisson_nll_loss(model(x), count, reduction="none", full=True).sum()
    optimizer.zero_grad()
    loss.backward()
    clip(list(model.parameters()), 1.0)
    optimizer.step()
    losses.append(loss.item() / count.numel())
print(f"loss {sum(losses[-20:]) / 20:.4f}")
