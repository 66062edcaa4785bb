"""A diffusion model of short waves: the loss depends on the drawn noise level; trained with accelerate."""

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import ottava

PLAIN = "plain" in sys.argv


class Denoiser(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, 128), nn.SiLU(), nn.Linear(128, 128))
        self.enter = nn.Linear(width, 128)
        self.body = nn.ModuleList(nn.Linear(128, 128) for _ in range(3))
        self.leave = nn.Linear(128, width)

    def forward(self, x, t):
        waves = t[:, None] * 2.0 ** torch.arange(8)
        time = self.time(torch.cat([waves.sin(), waves.cos()], 1))
        h = self.enter(x)
        for layer in self.body:
            h = h + layer(F.silu(h + time))
        return self.leave(F.silu(h))


def main():
    set_seed(3)
    accelerator = Accelerator(cpu=True)
    phase, pitch = torch.rand(24 * 180, 1) * 6.28, torch.rand(24 * 180, 1) * 0.6 + 0.1
    data = torch.sin(phase + pitch * torch.arange(48))
    model = Denoiser()
    if not PLAIN:
        ottava.convert(model, "delayed")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(TensorDataset(data), batch_size=24, shuffle=True)
    )
    losses = []
    for (x,) in loader:
        t = torch.rand(()).pow(2).expand(len(x))
        noise = torch.randn_like(x)
        noisy = (1 - t[:, None]) * x + t[:, None] * noise
        loss = F.mse_loss(model(noisy, t), noise - x)
        optimizer.zero_grad()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    print(f"loss {sum(losses[-10:]) / 10:.4f}")


if __name__ == "__main__":
    main()
