"""A calibration curve by Levenberg and Marquardt: steps that make the fit worse are taken back.

    python yod_10.py good

A small net, all points at once, in FP64. The damping goes up after a step that was taken back and down after a good one.
"""

import os

import torch
from torch import nn
from torch.func import functional_call, jacrev

SEED = int(os.environ.get("SEED", "0"))
POINTS, NOISE, TURNS = 240, 0.01, 120


class LevenbergMarquardt(torch.optim.Optimizer):
    """One group; `damping` is the only setting."""

    def __init__(self, parameters, damping=1e-2):
        super().__init__(parameters, {"damping": damping})

    @torch.no_grad()
    def step(self, closure):
        """`closure` gives residuals and their derivatives; `closure(derivatives=False)` residuals alone."""
        group = self.param_groups[0]
        residuals, jacobian = closure()
        before = residuals.square().mean()
        normal, right = jacobian.T @ jacobian, jacobian.T @ residuals
        old = [p.clone() for p in group["params"]]
        change = torch.linalg.solve(normal + group["damping"] * torch.eye(len(normal), dtype=normal.dtype), right)
        for p, part in zip(group["params"], change.split([p.numel() for p in group["params"]])):
            p -= part.view_as(p)
        if closure(derivatives=False).square().mean() < before:
            group["damping"] = max(group["damping"] / 3, 1e-6)
            return before, True
        for p, kept in zip(group["params"], old):
            p.copy_(kept)
        group["damping"] *= 4
        return before, False


def curve(x):
    return torch.sin(5 * x) * torch.exp(-x) + 0.5 * torch.tanh(8 * (x - 0.4))


def sample(count, generator):
    x = 2 * torch.rand(count, 1, generator=generator, dtype=torch.float64) - 1
    return x, curve(x) + NOISE * torch.randn(count, 1, generator=generator, dtype=torch.float64)


def main():
    torch.manual_seed(SEED)
    generator = torch.Generator().manual_seed(70 + SEED)
    x, y = sample(POINTS, generator)
    x_held, y_held = sample(1000, generator)
    model = nn.Sequential(nn.Linear(1, 12), nn.Tanh(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    names = [name for name, _ in model.named_parameters()]
    optimizer = LevenbergMarquardt(model.parameters())

    def residuals(values):
        return (functional_call(model, dict(zip(names, values)), (x,)) - y)[:, 0]

    def closure(derivatives=True):
        values = tuple(p.detach() for p in model.parameters())
        if not derivatives:
            return residuals(values)
        parts = jacrev(residuals)(values)
        return residuals(values), torch.cat([part.flatten(1) for part in parts], 1)

    def evaluate():
        with torch.no_grad():
            return (model(x_held) - y_held).square().mean().item()

    print(f"first loss {evaluate():.6f}")
    back = 0
    for turn in range(TURNS):
        loss, taken = optimizer.step(closure)
        back += not taken
        if turn % 10 == 0:
            print(f"turn {turn} loss {loss.item():.6f} damping {optimizer.param_groups[0]['damping']:.1e} taken back so far {back}")
    print(f"held-out {evaluate():.6f}; the noise has {NOISE**2:.6f}")
    print(f"final loss {evaluate():.6f}")


main()
