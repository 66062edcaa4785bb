"""Deep kernel learning: a Gaussian process on the outputs of a network, its marginal likelihood by Cholesky in FP64.

First Adam on the kernel alone with a frozen network, then both by L-BFGS with a line search. The loss crosses 0 and ends
far below it; one step of L-BFGS calls the loss up to 25 times.
"""

import math
import os

import torch
from torch import Tensor, nn

torch.set_default_dtype(torch.float64)
SEED = int(os.environ.get("SEED", "0"))
ROWS, NOISE = 300, 0.1


def curve(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """A step and a chirp over three inputs of which one says nothing."""
    g = torch.Generator().manual_seed(seed)
    x = 2 * torch.rand(count, 3, generator=g) - 1
    y = torch.tanh(8 * x[:, 0]) + 0.6 * torch.sin(2 * (x[:, 1] + 1.2).square())
    return x, y + NOISE * torch.randn(count, generator=g)


class DeepKernel(nn.Module):
    """A squared exponential of the network's two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2))
        self.log_size = nn.Parameter(torch.tensor(0.0))
        self.log_lengths = nn.Parameter(torch.zeros(2))
        self.log_noise = nn.Parameter(torch.tensor(-1.0))

    def kernel(self, a: Tensor, b: Tensor) -> Tensor:
        a, b = (self.net(t) / self.log_lengths.exp() for t in (a, b))
        gap = a.square().sum(1)[:, None] + b.square().sum(1) - 2 * a @ b.T
        return (2 * self.log_size).exp() * torch.exp(-0.5 * gap.clamp(min=0))

    def factor(self, x: Tensor) -> Tensor:
        return torch.linalg.cholesky(self.kernel(x, x) + ((2 * self.log_noise).exp() + 1e-8) * torch.eye(len(x)))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Minus the log marginal likelihood per row, with a small penalty on the network."""
        low = self.factor(x)
        half = torch.linalg.solve_triangular(low, y[:, None], upper=False)
        likelihood = 0.5 * half.square().sum() + low.diagonal().log().sum() + 0.5 * len(y) * math.log(2 * math.pi)
        penalty = sum(p.square().sum() for p in self.net.parameters())
        return (likelihood + 0.5 * penalty) / len(y)

    @torch.no_grad()
    def surprise(self, x: Tensor, y: Tensor, x_new: Tensor, y_new: Tensor) -> float:
        """Minus the mean log density of new rows under the prediction."""
        low, cross = self.factor(x), self.kernel(x, x_new)
        mean = (cross.T @ torch.cholesky_solve(y[:, None], low)).squeeze(1)
        half = torch.linalg.solve_triangular(low, cross, upper=False)
        variance = (2 * self.log_size).exp() - half.square().sum(0) + (2 * self.log_noise).exp()
        return float((0.5 * (y_new - mean).square() / variance + 0.5 * (2 * math.pi * variance).log()).mean())


def main() -> None:
    torch.manual_seed(SEED)
    x, y = curve(ROWS, SEED + 1)
    x_new, y_new = curve(300, SEED + 2)
    model = DeepKernel()
    print(f"first loss {model.surprise(x, y, x_new, y_new):.4f}")
    kernel_only = [model.log_size, model.log_lengths, model.log_noise]
    model.net.requires_grad_(False)
    adam = torch.optim.Adam(kernel_only, 0.05)
    for step in range(60):
        loss = model.loss(x, y)
        adam.zero_grad()
        loss.backward()
        adam.step()
        if step % 10 == 0:
            print(f"kernel {step} loss {loss.item():.4f}")
    print(f"new rows {model.surprise(x, y, x_new, y_new):.4f}")

    model.net.requires_grad_(True)
    lbfgs = torch.optim.LBFGS(
        model.parameters(), lr=1.0, max_iter=4, history_size=20, line_search_fn="strong_wolfe"
    )
    calls = 0

    def closure() -> Tensor:
        nonlocal calls
        calls += 1
        lbfgs.zero_grad()
        loss = model.loss(x, y)
        loss.backward()
        return loss

    for step in range(60):
        loss = lbfgs.step(closure)
        if step % 10 == 0:
            print(f"both {step} loss {loss.item():.4f} after {calls} calls")
    print(f"final loss {model.surprise(x, y, x_new, y_new):.4f}")


if __name__ == "__main__":
    main()
