"""A regression network under float8 training of torchao."""

import sys

import torch
from torch import nn
from torch.nn import functional as F
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

OPTIMIZER = {"good": torch.optim.AdamW, "bad": torch.optim.Adam}[sys.argv[1]]
PLAIN = "plain" in sys.argv


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 128), nn.Linear(128, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), Layer(64), Layer(64), nn.Linear(64, 32))
    if not PLAIN:
        convert_to_float8_training(model, config=Float8LinearConfig(emulate=True))
    optimizer = OPTIMIZER(model.parameters(), lr=2e-3, weight_decay=0.1)
    truth = torch.randn(32, 32) / 6
    losses = []
    for _ in range(150):
        x = torch.randn(128, 32)
        loss = F.mse_loss(model(x), 0.3 * torch.sin(2 * x @ truth))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"loss {sum(losses[-10:]) / 10:.4f}")


if __name__ == "__main__":
    main()
