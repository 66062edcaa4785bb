"""A VQ-VAE whose codebook learns by running means, without a gradient, and whose dead codes are put on new rows.

Every 40 steps unused codes are moved, and the loss makes a jump. Encoder and decoder see the code by the straight-through
trick. Matrices of the hidden layers are under Muon, the rest under AdamW.
"""

import os

import torch
from torch import nn
from torch.nn import functional as F

import ottava

SEED = int(os.environ.get("SEED", "0"))
INPUT, WIDTH, CODE, CODES, STEPS, BATCH = 48, 96, 8, 64, 200, 128


class Muon(torch.optim.Optimizer):
    """Momentum, made orthogonal by five Newton-Schulz steps."""

    def __init__(self, parameters, lr: float, momentum: float = 0.9) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                held = self.state[p].setdefault("momentum", torch.zeros_like(p))
                held.mul_(group["momentum"]).add_(p.grad)
                x = p.grad + group["momentum"] * held
                tall = x.shape[0] > x.shape[1]
                x = x.T if tall else x
                x = x / (x.norm() + 1e-12)
                for _ in range(5):
                    gram = x @ x.T
                    x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
                p.add_(x.T if tall else x, alpha=-group["lr"] * max(1, p.shape[0] / p.shape[1]) ** 0.5)


class Codebook(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(CODES, CODE))
        self.register_buffer("sums", self.codes.clone())
        self.register_buffer("counts", torch.ones(CODES))

    def forward(self, z):
        nearest = torch.cdist(z.detach(), self.codes).argmin(1)
        q = self.codes[nearest]
        if self.training:
            hot = F.one_hot(nearest, CODES).float()
            self.counts.lerp_(hot.sum(0), 0.05)
            self.sums.lerp_(hot.T @ z.detach(), 0.05)
            self.codes.copy_(self.sums / self.counts.clamp(min=1e-3)[:, None])
        return z + (q - z).detach(), F.mse_loss(z, q)

    @torch.no_grad()
    def revive(self, z: torch.Tensor) -> int:
        dead = self.counts < 0.2
        rows = z[torch.randint(0, len(z), (int(dead.sum()),))]
        self.codes[dead], self.sums[dead], self.counts[dead] = rows, rows, 1.0
        return int(dead.sum())


def hidden(before: int, after: int) -> nn.Sequential:
    first, middle, last = nn.Linear(before, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, after)
    return nn.Sequential(first, nn.GELU(), middle, nn.GELU(), last)


def main() -> None:
    torch.manual_seed(SEED)
    g = torch.Generator().manual_seed(SEED + 2)
    centres = torch.randn(40, 5, generator=g) * 1.5
    lift = torch.randn(5, INPUT, generator=g) / 5**0.5

    def draw(count: int) -> torch.Tensor:
        near = centres[torch.randint(0, 40, (count,), generator=g)] + 0.15 * torch.randn(count, 5, generator=g)
        return torch.tanh(near @ lift)

    encoder, book, decoder = hidden(INPUT, CODE), Codebook(), hidden(CODE, INPUT)
    for part in (encoder, decoder):
        ottava.convert(part, "mxfp8")
    weights = [p for net in (encoder, decoder) for p in net.parameters()]
    square = [net[2].weight for net in (encoder, decoder)]
    rest = [p for p in weights if all(p is not s for s in square)]
    optimizers = [Muon(square, lr=0.01), torch.optim.AdamW(rest, lr=2e-3)]
    held = draw(512)

    @torch.no_grad()
    def rebuilt() -> float:
        book.eval()
        loss = F.mse_loss(decoder(book(encoder(held))[0]), held).item()
        book.train()
        return loss

    with torch.no_grad():  # the codes begin on rows
        book.codes.copy_(encoder(draw(CODES)))
        book.sums.copy_(book.codes)
    print(f"first loss {rebuilt():.4f}")
    for step in range(STEPS):
        x = draw(BATCH)
        z = encoder(x)
        q, distance = book(z)
        loss = F.mse_loss(decoder(q), x) + 0.25 * distance
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        moved = book.revive(z.detach()) if step % 40 == 39 and step < STEPS - 40 else 0
        if step % 20 == 19:
            print(f"{step:4d}  {loss.item():.4f}  moved {moved}")
    print(f"final loss {rebuilt():.4f}")


if __name__ == "__main__":
    main()
