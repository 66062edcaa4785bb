"""A denoiser for frames of sound at any volume; current scaling."""

import torch
from torch import nn

from models import Fp8Linear, start, to8

bad = start()


class Linear(Fp8Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes, bias=False)
        self.inverse = {"x": torch.ones(()), "w": torch.ones(()), "g": torch.ones(())}

    def cast(self, t, role):
        scale = 448 / t.abs().max().clamp(min=1e-12)
        inverse = self.inverse[role] if bad else 1 / scale
        self.inverse[role] = 1 / scale
        return to8(t * scale) * inverse


model = nn.Sequential(nn.Linear(128, 192, bias=False), nn.ReLU(), Linear(192, 192), nn.ReLU(), Linear(192, 128))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
time = torch.arange(128) / 128
for step in range(300):
    tone = torch.randint(2, 12, (128, 1))
    clean = torch.sin(6.2832 * (tone * time + torch.rand(128, 1)))
    volume = torch.exp2(6 * torch.rand(()) - 3)
    noisy = volume * (clean + 0.5 * torch.randn(128, 128))
    loss = (model(noisy) - volume * clean).square().mean() / volume**2
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    print(step, round(loss.item(), 4))
