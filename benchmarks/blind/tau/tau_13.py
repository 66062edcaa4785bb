"""Autoencoder whose weights live on the E4M3 grid to save memory, with Adam on top."""
import os
import sys

import torch
from torch import nn

VARIANT, PLAIN, SEED = sys.argv[1], "plain" in sys.argv, int(os.environ.get("SEED", 0))


def on_grid(w, scale):
    return (w / scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(w.dtype) * scale


def stochastic(w, scale):
    """Rounds up or down with the probability that makes it right on average."""
    t = w / scale
    step = torch.exp2(torch.floor(torch.log2(t.abs().clamp_min(2.0**-6))) - 3)
    t = torch.floor(t / step + torch.rand_like(t)) * step
    return t.clamp(-448, 448).to(torch.float8_e4m3fn).to(w.dtype) * scale


class Fp8WeightAdam(torch.optim.Adam):
    def __init__(self, params, lr):
        super().__init__(params, lr=lr)
        with torch.no_grad():
            for p in self.matrices():
                p.fp8_scale = p.abs().max().item() * 2 / 448
                if not PLAIN:
                    p.copy_(on_grid(p, p.fp8_scale))

    def matrices(self):
        return [p for group in self.param_groups for p in group["params"] if p.ndim == 2]

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        if PLAIN:
            return
        for p in self.matrices():
            p.copy_(stochastic(p, p.fp8_scale) if VARIANT == "good" else on_grid(p, p.fp8_scale))


torch.manual_seed(SEED)
model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 16), nn.Linear(16, 128), nn.GELU(), nn.Linear(128, 64))
basis = torch.randn(12, 64, generator=torch.Generator().manual_seed(4))
optimizer = Fp8WeightAdam(model.parameters(), lr=5e-4)
losses = []
for step in range(100):
    x = torch.tanh(torch.randn(128, 12) @ basis / 3)
    loss = (model(x) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 20 == 0:
        print(f"step {step} loss {loss.item():.5f}")
print(f"final loss {sum(losses[-10:]) / 10:.5f}")
