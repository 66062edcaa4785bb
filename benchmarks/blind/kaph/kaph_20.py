"""Contrastive predictive coding of speech-like frames: a GRU tells the frame four steps on from 255 others of the batch.

The loss begins near ln 256 and has a floor far above 0, since frames of one sound look alike. Lion by hand; what counts
is a linear probe of the sounds, which are not used in the training.
"""

import os

import torch
from torch import Tensor, nn

import ottava

SEED = int(os.environ.get("SEED", "0"))
SOUNDS, BANDS, FRAMES, AHEAD = 10, 40, 32, 4


def speech(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Sounds of eight frames each in an order that is mostly fixed, with a little of a speaker's colour and much noise."""
    fixed = torch.Generator().manual_seed(6)
    spectra = torch.randn(SOUNDS, BANDS, generator=fixed)
    follows = torch.randperm(SOUNDS, generator=fixed)
    g = torch.Generator().manual_seed(seed)
    sound = torch.randint(SOUNDS, (count,), generator=g)
    parts = []
    for _ in range(FRAMES // 8):
        parts.append(sound[:, None].expand(-1, 8))
        stray = torch.randint(SOUNDS, (count,), generator=g)
        sound = torch.where(torch.rand(count, generator=g) < 0.8, follows[sound], stray)
    sounds = torch.cat(parts, 1)
    speaker = 0.3 * torch.randn(count, 1, BANDS, generator=g)
    return spectra[sounds] + speaker + 2.5 * torch.randn(count, FRAMES, BANDS, generator=g), sounds


class Lion:
    """Steps of one size: the sign of a mixture of momentum and gradient."""

    def __init__(self, parameters, rate: float, decay: float) -> None:
        self.parameters, self.rate, self.decay = list(parameters), rate, decay
        self.momentum = [torch.zeros_like(p) for p in self.parameters]

    @torch.no_grad()
    def step(self, factor: float) -> None:
        for p, m in zip(self.parameters, self.momentum, strict=True):
            update = (0.9 * m + 0.1 * p.grad).sign()
            p.mul_(1 - factor * self.rate * self.decay).sub_(factor * self.rate * update)
            m.mul_(0.99).add_(p.grad, alpha=0.01)
            p.grad = None


class Cpc(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(BANDS, 96), nn.GELU(), nn.Linear(96, 64))
        self.context = nn.GRU(64, 64, batch_first=True)
        self.predict = nn.Linear(64, 64)

    def forward(self, frames: Tensor) -> Tensor:
        z = self.encode(frames)
        c, _ = self.context(z)
        at = 8 + torch.randperm(FRAMES - AHEAD - 8)[:8]  # eight places of each row
        guess = self.predict(c[:, at]).flatten(0, 1)
        truth = z[:, at + AHEAD].flatten(0, 1)
        return nn.functional.cross_entropy(guess @ truth.T / 8.0, torch.arange(len(guess)))


@torch.no_grad()
def probe(model: Cpc) -> float:
    """The share of wrong sounds by a ridge regression on contexts, on new speakers."""
    codes = []
    for seed in (SEED + 5001, SEED + 5002):
        frames, sounds = speech(200, seed)
        c, _ = model.context(model.encode(frames))
        codes.append((nn.functional.pad(c[:, 7::8].flatten(0, 1), (0, 1), value=1.0), sounds[:, 7::8].flatten()))
    (x, y), (x_new, y_new) = codes
    target = nn.functional.one_hot(y, SOUNDS).float()
    solved = torch.linalg.solve(x.T @ x + 1.0 * torch.eye(65), x.T @ target)
    return float(((x_new @ solved).argmax(1) != y_new).float().mean())


def main() -> None:
    torch.manual_seed(SEED)
    model = Cpc()
    ottava.convert(model, "mxfp8_floor")
    print(f"first loss {probe(model):.4f}")
    optimizer = Lion(model.parameters(), 6e-4, 0.1)
    steps = 200
    for step in range(steps):
        frames, _ = speech(32, SEED * 10_000 + step)
        loss = model(frames)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step(min(1.0, (step + 1) / 20) * (1 - step / steps))
        if step % 20 == 0:
            print(f"step {step} loss {loss.item():.4f}")
    print(f"final loss {probe(model):.4f}")


if __name__ == "__main__":
    main()
