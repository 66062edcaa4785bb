"""A network solves u'' = f on a line: Adam first, then L-BFGS, which reports the loss before each of its steps of many evaluations."""
import math
import os

import torch
from torch import nn

SEED = int(os.environ.get("SEED", 0))
torch.manual_seed(SEED)
torch.set_default_dtype(torch.float64)  # L-BFGS goes far below what FP32 can tell apart
ADAM_STEPS, LBFGS_STEPS = 150, 40


class Sine(nn.Module):
    def forward(self, x):
        return torch.sin(x)


model = nn.Sequential(nn.Linear(1, 32), Sine(), nn.Linear(32, 32), Sine(), nn.Linear(32, 1))
with torch.no_grad():
    model[0].weight.uniform_(-6, 6)


def truth(x):
    return torch.sin(2 * math.pi * x) + 0.3 * torch.sin(6 * math.pi * x)


def force(x):
    a, b = 2 * math.pi, 6 * math.pi
    return -(a**2) * torch.sin(a * x) - 0.3 * b**2 * torch.sin(b * x)


inside = torch.linspace(0, 1, 128).unsqueeze(1)
ends = torch.tensor([[0.0], [1.0]])
held = torch.rand(500, 1)


def loss_of(x):
    x = x.clone().requires_grad_(True)
    u = model(x)
    (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
    residual = (second - force(x)).square().mean()
    # the residual is in units of u / x**2, so the two ends weigh a thousand times as much as a point inside
    return residual + 1000 * (model(ends) - truth(ends)).square().mean()


def error():
    with torch.no_grad():
        return (model(held) - truth(held)).square().mean().sqrt().item()


print(f"first loss {loss_of(inside).item():.4f}")
adam = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(ADAM_STEPS):
    adam.zero_grad()
    points = torch.rand(128, 1)
    loss = loss_of(points)
    loss.backward()
    adam.step()
    if step % 25 == 0:
        print(f"adam {step} loss {loss.item():.4f} error {error():.4f}")

lbfgs = torch.optim.LBFGS(model.parameters(), lr=1.0, max_iter=20, history_size=50, line_search_fn="strong_wolfe")
for step in range(LBFGS_STEPS):

    def closure():
        lbfgs.zero_grad()
        loss = loss_of(inside)
        loss.backward()
        return loss

    loss = lbfgs.step(closure)
    if step % 5 == 0:
        print(f"lbfgs {step} loss {loss.item():.6f} error {error():.6f}")

print(f"error of u {error():.6f}")
print(f"final loss {loss_of(inside).item():.6f}")
