"""A deep equilibrium model: forward finds a fixed point without a graph, backward solves a second fixed point.

python zayin_20.py good|bad
"""

import os

import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

SEED = int(os.environ.get("SEED", 0))
torch.manual_seed(SEED)
WIDTH, INPUTS, CLASSES = 64, 24, 6
teacher = nn.Sequential(nn.Linear(INPUTS, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, CLASSES))
for p in teacher.parameters():
    p.data.mul_(3.0)


def rows(count):
    x = torch.randn(count, INPUTS)
    with torch.no_grad():
        return x, teacher(x).argmax(dim=1)


class Equilibrium(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = spectral_norm(nn.Linear(WIDTH, WIDTH, bias=False))
        self.enter = nn.Linear(INPUTS, WIDTH)
        self.leave = nn.Linear(WIDTH, CLASSES)
        self.iterations = (0, 0)

    def cell(self, z, entered, weight):
        return torch.tanh(0.9 * z @ weight.T + entered)

    def solve(self, function, start, limit=40, tolerance=1e-4):
        z = start
        for count in range(1, limit + 1):
            new = function(z)
            if (new - z).norm() < tolerance * (1 + new.norm()):
                return new, count
            z = new
        return z, limit

    def forward(self, x):
        entered = self.enter(x)
        weight = self.inner.weight  # once a step: each access moves the estimate of its norm
        with torch.no_grad():
            z, forwards = self.solve(lambda z: self.cell(z, entered, weight), torch.zeros_like(entered))
        self.iterations = (forwards, self.iterations[1])
        z = self.cell(z, entered, weight)  # the only application that autograd sees
        if z.requires_grad:
            start = z.detach().requires_grad_()
            again = self.cell(start, entered, weight)

            def implicit(grad):
                solved, backwards = self.solve(
                    lambda g: torch.autograd.grad(again, start, g, retain_graph=True)[0] + grad, grad
                )
                self.iterations = (self.iterations[0], backwards)
                return solved

            z.register_hook(implicit)
        return self.leave(z)


model = Equilibrium()
optimizer = torch.optim.RMSprop(model.parameters(), lr=2e-3, alpha=0.95)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, 200)
train_x, train_y = rows(8192)
test_x, test_y = rows(1024)


def held_out():
    model.eval()
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model(test_x), test_y).item()
    model.train()
    return loss


print(f"first loss {held_out():.4f}")
for step in range(200):
    chosen = torch.randint(0, len(train_x), (128,))
    loss = nn.functional.cross_entropy(model(train_x[chosen]), train_y[chosen])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    if step % 25 == 0:
        print(f"step {step} loss {loss.item():.4f} iterations {model.iterations} held out {held_out():.4f}")
print(f"final loss {held_out():.4f}")
