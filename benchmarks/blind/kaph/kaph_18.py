"""Weight uncertainty (Bayes by backprop): each weight is a Gaussian that is drawn anew in each forward.

What is minimized is the bound for all rows: a likelihood summed over the data set and a divergence from the prior of
tens of thousands of nats. The matrix products have FP8 operands by hand, cast with one scale per tensor.
"""

import math
import os

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

SEED = int(os.environ.get("SEED", "0"))
ROWS, FEATURES, CLASSES, PRIOR = 4096, 32, 8, 0.3


class MatmulFp8(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor) -> Tensor:
        x8, w8 = MatmulFp8.cast(x, torch.float8_e4m3fn), MatmulFp8.cast(w, torch.float8_e4m3fn)
        ctx.save_for_backward(x8, w8)
        return x8 @ w8.t()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        x8, w8 = ctx.saved_tensors
        g8 = MatmulFp8.cast(grad, torch.float8_e5m2)
        return g8 @ w8, g8.t() @ x8

    @staticmethod
    def cast(t: Tensor, kind: torch.dtype) -> Tensor:
        scale = torch.finfo(kind).max / t.abs().amax().clamp(min=1e-30)
        return (t * scale).to(kind).to(t.dtype) / scale


class Uncertain(nn.Module):
    """A linear layer with a mean and a spread for each weight."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5)
        self.rho = nn.Parameter(torch.full((outputs, inputs), -4.0))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def spread(self) -> Tensor:
        return nn.functional.softplus(self.rho)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.mean + self.spread() * torch.randn_like(self.mean)
        return MatmulFp8.apply(x, weight) + self.bias

    def divergence(self) -> Tensor:
        s = self.spread()
        return (math.log(PRIOR) - s.log() + (s.square() + self.mean.square()) / (2 * PRIOR**2) - 0.5).sum()


def data(count: int, seed: int) -> TensorDataset:
    fixed = torch.Generator().manual_seed(17)
    teacher = torch.randn(FEATURES, 24, generator=fixed), torch.randn(24, CLASSES, generator=fixed)
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(count, FEATURES, generator=g)
    scores = torch.relu(x @ teacher[0]) @ teacher[1]
    return TensorDataset(x, (scores - scores.mean(0)).argmax(1))


@torch.no_grad()
def loss_of(model: nn.Sequential, held_out: TensorDataset) -> float:
    """The mean of ten drawn networks on held-out rows."""
    x, y = held_out.tensors
    chances = torch.stack([model(x).softmax(-1) for _ in range(10)]).mean(0)
    return float(nn.functional.nll_loss(chances.clamp(min=1e-9).log(), y))


def main() -> None:
    torch.manual_seed(SEED)
    model = nn.Sequential(Uncertain(FEATURES, 96), nn.ReLU(), Uncertain(96, 96), nn.ReLU(), Uncertain(96, CLASSES))
    held_out = data(1024, SEED + 66)
    loader = DataLoader(data(ROWS, SEED + 1), batch_size=256, shuffle=True)
    optimizer = torch.optim.Adam(model.parameters(), 4e-3)
    print(f"first loss {loss_of(model, held_out):.4f}")
    epochs = 16
    for epoch in range(epochs):
        for x, y in loader:
            likelihood = nn.functional.cross_entropy(model(x), y) * ROWS
            divergence = sum(layer.divergence() for layer in model if isinstance(layer, Uncertain))
            share = min(1.0, (epoch + 1) / epochs) * 0.1  # a cold posterior: a tenth of the divergence at most
            loss = likelihood + share * divergence
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch} bound {loss.item():.0f} likelihood {likelihood.item():.0f} kl {divergence.item():.0f}")
    print(f"final loss {loss_of(model, held_out):.4f}")


if __name__ == "__main__":
    main()
