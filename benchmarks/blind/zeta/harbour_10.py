"""Many small micro-batches, gradients summed in a one-byte buffer between them (out of memory otherwise)."""
import sys

import torch
from torch import nn
from torch.nn import functional as F

VARIANT, PLAIN = sys.argv[1], "plain" in sys.argv
torch.manual_seed(9)
MICRO, E5M2 = 16, torch.float8_e5m2
model = nn.Sequential(nn.Linear(48, 128), nn.LayerNorm(128), nn.GELU(), nn.Linear(128, 128), nn.LayerNorm(128), nn.GELU(), nn.Linear(128, 48))
params = list(model.parameters())
nn.init.zeros_(model[-1].weight)
nn.init.zeros_(model[-1].bias)
optimizer = torch.optim.Adam(params, lr=1e-4, eps=1e-12)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, 160)
turn = torch.linalg.qr(torch.randn(48, 48))[0]


class Buffers:
    def __init__(self, params):
        self.params = params
        self.codes = [torch.zeros_like(p, dtype=torch.float32 if PLAIN else E5M2) for p in params]
        self.scales = [torch.ones(()) for _ in params]

    @torch.no_grad()
    def add(self):
        for i, p in enumerate(self.params):
            total = self.codes[i].float() * self.scales[i] + p.grad
            if VARIANT == "good":
                self.scales[i] = total.abs().max().clamp(min=1e-20) / 4096
            self.codes[i] = (total / self.scales[i]).to(self.codes[i].dtype)
            p.grad = None

    def give(self):
        for i, p in enumerate(self.params):
            p.grad = self.codes[i].float() * self.scales[i]
            self.codes[i] = torch.zeros_like(self.codes[i])


buffers = Buffers(params)
losses = []
for step in range(160):
    seen = 0.0
    for _ in range(MICRO):
        x = torch.randn(4, 48)
        y = 0.001 * (x @ turn)  # metres
        loss = F.mse_loss(model(x), y)
        (loss / MICRO).backward()
        seen += loss.item() / MICRO
        buffers.add()
    buffers.give()
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    losses.append(seen)
print(f"loss {sum(losses[-20:]) / 20:.4g}")
