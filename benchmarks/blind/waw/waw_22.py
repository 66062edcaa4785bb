"""Weights of one bit: the forward takes the signs of hidden weights, the backward lets gradients through where |w| <
1 (straight through).

Hidden weights are held in [-1, 1], and signs flip all the time, so the loss is rough. Activations are cast to E4M3 by
hand and their gradients to E5M2. The rate falls to 0, at which the flips stop.
"""

import os

import torch
from torch import nn
from torch.nn import functional as F

SEED = int(os.environ.get("SEED", "0"))
SIDE, CLASSES, STEPS = 12, 6, 220


class Cast(torch.autograd.Function):
    """FP8 there and back, with one scale a tensor."""

    @staticmethod
    def to(x, kind):
        scale = torch.finfo(kind).max / x.abs().amax().clamp(min=1e-12)
        return (x * scale).to(kind).to(x.dtype) / scale

    @staticmethod
    def forward(ctx, x):
        return Cast.to(x, torch.float8_e4m3fn)

    @staticmethod
    def backward(ctx, dy):
        return Cast.to(dy, torch.float8_e5m2)


class Sign(torch.autograd.Function):
    """The sign, whose gradient is that of a clip to [-1, 1]."""

    @staticmethod
    def forward(ctx, w):
        ctx.save_for_backward(w)
        return torch.where(w >= 0, 1.0, -1.0)

    @staticmethod
    def backward(ctx, dy):
        (w,) = ctx.saved_tensors
        return dy * (w.abs() <= 1)


class Binary(nn.Linear):
    """Signs times one factor a row, the mean of |w|, which has no gradient."""

    def forward(self, x):
        factor = self.weight.detach().abs().mean(1)
        return F.linear(Cast.apply(x), Sign.apply(self.weight)) * factor


def shapes(number, prototypes, generator):
    """Noisy pictures of six shapes, moved by up to one pixel."""
    labels = torch.randint(0, CLASSES, (number,), generator=generator)
    moved = torch.stack([
        prototypes[k].roll(tuple(torch.randint(-1, 2, (2,), generator=generator).tolist()), (0, 1)) for k in labels.tolist()
    ])
    return (moved + 1.0 * torch.randn(moved.shape, generator=generator)).flatten(1), labels


def main():
    torch.manual_seed(SEED)
    generator = torch.Generator().manual_seed(2 + SEED)
    prototypes = torch.randn(CLASSES, SIDE, SIDE, generator=generator)
    x, y = shapes(4000, prototypes, generator)
    held, truth = shapes(800, prototypes, generator)
    model = nn.Sequential(
        Binary(SIDE * SIDE, 256, bias=False), nn.BatchNorm1d(256), nn.Hardtanh(),
        Binary(256, 256, bias=False), nn.BatchNorm1d(256), nn.Hardtanh(), nn.Linear(256, CLASSES),
    )
    hidden = [m.weight for m in model if isinstance(m, Binary)]
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: max(0.0, 1 - s / STEPS))

    @torch.no_grad()
    def evaluate():
        model.eval()
        logits = model(held)
        model.train()
        return F.cross_entropy(logits, truth).item(), (logits.argmax(1) == truth).float().mean().item()

    print("first loss", round(evaluate()[0], 4))
    for step in range(STEPS):
        chosen = torch.randint(0, len(x), (64,))
        loss = F.cross_entropy(model(x[chosen]), y[chosen])
        before = [w >= 0 for w in hidden] if step % 20 == 0 else None
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rate.step()
        with torch.no_grad():
            for w in hidden:
                w.clamp_(-1, 1)
        if before:
            flips = sum(((w >= 0) != b).sum().item() for w, b in zip(hidden, before, strict=True))
            print(step, round(loss.item(), 4), "flips", flips, "held", *(round(v, 4) for v in evaluate()))
    print("final loss", round(evaluate()[0], 4))


if __name__ == "__main__":
    main()
