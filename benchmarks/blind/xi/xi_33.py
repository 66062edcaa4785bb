"""Fits a smooth field with a residual tower under one of ottava's recipes."""

import sys

import torch
from torch import nn
from torch.nn import functional as F

import ottava

RECIPE = {"good": "mxfp8", "bad": "mxfp4"}[sys.argv[1]]
PLAIN = "plain" in sys.argv


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 128), nn.Linear(128, width)

    def forward(self, x):
        return x + self.down(F.silu(self.up(self.norm(x))))


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), Layer(64), Layer(64), Layer(64), nn.Linear(64, 32))
    if not PLAIN:
        ottava.convert(model, RECIPE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=150, pct_start=0.1)
    truth = torch.randn(32, 32) / 12
    losses = []
    for _ in range(150):
        x = torch.randn(128, 32)
        loss = F.mse_loss(model(x), torch.sin(x @ truth))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    print(f"loss {sum(losses[-10:]) / 10:.4f}")


if __name__ == "__main__":
    main()
