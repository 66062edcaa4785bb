"""SGD with a heavy momentum: it overshoots, swings, and comes to rest."""

import os
import sys

import torch
from torch import nn

MODE = sys.argv[1]
torch.manual_seed(int(os.environ.get("SEED", "0")))


def main():
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))
    teacher = nn.Sequential(nn.Linear(32, 8), nn.Tanh(), nn.Linear(8, 4)).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.012, momentum=0.97)
    losses = []
    for step in range(100):
        x = torch.randn(64, 32)
        y = 5 * teacher(x) + 1.5
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 5 == 0:
            print(f"step {step} loss {loss.item():.4f}")
    print(f"final loss {sum(losses[-10:]) / 10:.4f}")


main()
