"""Two voices in one microphone: a small separator with permutation-invariant training.

The loss is minus the signal-to-distortion ratio in decibels of the better of two orders; it starts above 0 and ends far
below. It has no scale, so the size of the output may drift, and rows of the batch weigh alike.
"""

import os
from dataclasses import replace

import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

SEED = int(os.environ.get("SEED", "0"))
SAMPLES, KERNEL, HOP, FILTERS, WIDTH, STEPS, BATCH = 512, 32, 16, 64, 96, 140, 16


def voices(count: int, g: torch.Generator) -> torch.Tensor:
    """A low and a high voice with overtones and a slow envelope, in any order."""
    time = torch.arange(SAMPLES) / SAMPLES
    both = []
    for low, high in ((8, 20), (60, 110)):
        pitch = low + (high - low) * torch.rand(count, 1, generator=g)
        phase = 2 * torch.pi * torch.rand(count, 1, generator=g)
        tone = torch.sin(2 * torch.pi * pitch * time + phase) + 0.4 * torch.sin(4 * torch.pi * pitch * time + phase)
        beat = 1 + 0.7 * torch.sin(2 * torch.pi * (2 * time + torch.rand(count, 1, generator=g)))
        both.append(tone * beat * (0.5 + torch.rand(count, 1, generator=g)))
    pair = torch.stack(both, 1)
    swap = torch.rand(count, generator=g) < 0.5
    pair[swap] = pair[swap].flip(1)
    return pair


class Separator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Conv1d(1, FILTERS, KERNEL, HOP, bias=False)
        self.body = nn.Sequential(
            nn.LayerNorm(FILTERS), nn.Linear(FILTERS, WIDTH), nn.PReLU(), nn.Linear(WIDTH, WIDTH), nn.PReLU()
        )
        self.context = nn.Conv1d(WIDTH, WIDTH, 5, padding=2, groups=WIDTH)
        self.masks = nn.Linear(WIDTH, 2 * FILTERS)
        self.decoder = nn.ConvTranspose1d(FILTERS, 1, KERNEL, HOP, bias=False)

    def forward(self, mixture):
        h = self.encoder(mixture[:, None])
        inner = self.body(h.transpose(1, 2))
        inner = inner + self.context(inner.transpose(1, 2)).transpose(1, 2)
        masks = self.masks(inner).sigmoid().transpose(1, 2).unflatten(1, (2, FILTERS))
        return self.decoder((masks * h[:, None]).flatten(0, 1))[:, 0].unflatten(0, (len(mixture), 2))


def decibels(guess: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    guess, truth = guess - guess.mean(-1, keepdim=True), truth - truth.mean(-1, keepdim=True)
    part = (guess * truth).sum(-1, keepdim=True) / (truth.square().sum(-1, keepdim=True) + 1e-8) * truth
    rest = guess - part
    return 10 * torch.log10((part.square().sum(-1) + 1e-8) / (rest.square().sum(-1) + 1e-8))


def loss_of(net: Separator, pair: torch.Tensor) -> torch.Tensor:
    guess = net(pair.sum(1))
    straight, crossed = decibels(guess, pair).mean(1), decibels(guess, pair.flip(1)).mean(1)
    return -torch.maximum(straight, crossed).mean()


def main() -> None:
    torch.manual_seed(SEED)
    g = torch.Generator().manual_seed(SEED)
    net = Separator()
    float8 = replace(Float8LinearConfig.from_recipe_name("tensorwise"), emulate=True)
    convert_to_float8_training(net, config=float8)
    optimizer = torch.optim.Adam(net.parameters(), lr=4e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 50, 0.5)
    held = voices(128, g)
    with torch.no_grad():
        print(f"first loss {loss_of(net, held).item():.4f}")
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(net, voices(BATCH, g))
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 5.0)
        optimizer.step()
        schedule.step()
        if step % 20 == 0:
            print(f"{step:4d}  {loss.item():.3f} dB")
    with torch.no_grad():
        print(f"final loss {loss_of(net, held).item():.4f}")


if __name__ == "__main__":
    main()
