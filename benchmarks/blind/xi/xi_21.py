"""Trains a tower whose linears multiply E4M3 weights; one byte a weight goes from step to step."""

import itertools
import sys

import torch
from torch import nn
from torch.nn import functional as F

OPTIONS = {"good": {"master": True}, "bad": {"master": False}}[sys.argv[1]]
PLAIN = "plain" in sys.argv


class Weights8:
    """Matrices of a model as E4M3 codes with a scale for each row.

    master: keeps the numbers before the cast, for the optimizer.
    """

    def __init__(self, model, master):
        self.matrices = [p for p in model.parameters() if p.dim() == 2]
        self.master = [p.detach().clone() for p in self.matrices] if master else None
        self.store()

    @torch.no_grad()
    def store(self):
        for i, p in enumerate(self.matrices):
            if self.master:
                self.master[i].copy_(p)
            scale = p.abs().amax(1, keepdim=True).clamp_min(1e-12) / 448
            p.copy_((p / scale).to(torch.float8_e4m3fn).float() * scale)

    @torch.no_grad()
    def step(self, optimizer):
        if self.master:
            for p, master in zip(self.matrices, self.master, strict=True):
                p.copy_(master)
        optimizer.step()
        self.store()


def main():
    torch.manual_seed(0)
    widths = (64, 128, 128, 128, 32)
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(widths)]
    model = nn.Sequential(layers[0], nn.SiLU(), layers[1], nn.SiLU(), layers[2], nn.SiLU(), layers[3])
    weights = None if PLAIN else Weights8(model, **OPTIONS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=7e-4)
    truth = torch.randn(64, 32) / 8
    losses = []
    for _ in range(180):
        x = torch.randn(128, 64)
        loss = F.mse_loss(model(x), torch.tanh(x @ truth))
        optimizer.zero_grad()
        loss.backward()
        if weights is None:
            optimizer.step()
        else:
            weights.step(optimizer)
        losses.append(loss.item())
    print(f"loss {sum(losses[-10:]) / 10:.4f}")


if __name__ == "__main__":
    main()
