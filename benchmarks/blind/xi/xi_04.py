"""Distils a function into a gated MLP; keeps an average of the weights and evaluates with it now and then."""

import sys

import torch
from torch import nn
from torch.nn import functional as F

import ottava

OPTIONS = {"good": {"restore_after_eval": True}, "bad": {"restore_after_eval": False}}[sys.argv[1]]
PLAIN = "plain" in sys.argv


class Average:
    """An exponential moving average of a model's parameters."""

    def __init__(self, model, decay, restore_after_eval=True):
        self.model, self.decay, self.restore = model, decay, restore_after_eval
        self.shadow = [p.detach().clone() for p in model.parameters()]
        self.kept = None

    @torch.no_grad()
    def update(self):
        for mean, p in zip(self.shadow, self.model.parameters(), strict=True):
            mean.lerp_(p, 1 - self.decay)

    @torch.no_grad()
    def __enter__(self):
        if self.restore:
            self.kept = [p.detach().clone() for p in self.model.parameters()]
        for p, mean in zip(self.model.parameters(), self.shadow, strict=True):
            p.copy_(mean)

    @torch.no_grad()
    def __exit__(self, *_):
        if self.kept is not None:
            for p, kept in zip(self.model.parameters(), self.kept, strict=True):
                p.copy_(kept)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate, self.up, self.down = nn.Linear(width, 128), nn.Linear(width, 128), nn.Linear(128, width)

    def forward(self, x):
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def main():
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 32))
    student = nn.Sequential(nn.Linear(32, 64), Block(64), Block(64), nn.Linear(64, 32))
    if not PLAIN:
        ottava.convert(student, "blockwise")
    optimizer = torch.optim.AdamW(student.parameters(), lr=2e-3)
    average = Average(student, decay=0.98, **OPTIONS)
    x_valid = torch.randn(256, 32)
    losses = []
    for step in range(180):
        x = torch.randn(256, 32)
        with torch.no_grad():
            y = teacher(x) * 3
        loss = F.mse_loss(student(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average.update()
        losses.append(loss.item())
        if step % 6 == 5:
            with average, torch.no_grad():
                valid = F.mse_loss(student(x_valid), teacher(x_valid) * 3)
            if step % 60 == 59:
                print(f"step {step + 1}: train {loss.item():.4f}, average {valid.item():.4f}")
    print(f"loss {sum(losses[-10:]) / 10:.4f}")


if __name__ == "__main__":
    main()
