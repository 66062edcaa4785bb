"""A denoiser for a diffusion model: each batch draws its noise levels, and a batch of high levels has a high loss."""

import sys

import torch
from torch import nn
from torch.nn import functional as F

import ottava

torch.manual_seed(113)
basis = torch.randn(4, 64)


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = nn.Linear(8, 192)
        self.inp, self.mid, self.out = nn.Linear(64, 192), nn.Linear(192, 192), nn.Linear(192, 64)

    def forward(self, x, t):
        code = torch.cat([torch.sin(t * 2.0**k) for k in range(4)] + [torch.cos(t * 2.0**k) for k in range(4)], 1)
        h = F.silu(self.inp(x) + self.time(code))
        return self.out(h + F.silu(self.mid(h)))


model = Denoiser()
if "plain" not in sys.argv:
    ottava.convert(model, "mxfp8")
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
losses = []
for step in range(150):
    x = torch.randn(48, 4) @ basis
    t = torch.rand(1) * 0.3 + torch.rand(48, 1) * 0.7
    noise = torch.randn_like(x)
    noisy = (t * torch.pi / 2).cos() * x + (t * torch.pi / 2).sin() * noise
    loss = (F.mse_loss(model(noisy, t), noise, reduction="none") / (t + 0.05)).mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    losses.append(loss.item())
print(f"loss {sum(losses[-10:]) / 10:.4f}")
