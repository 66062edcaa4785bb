"""Regression where one batch in fifteen comes from a hard site; float8 training of torchao."""

import sys

import torch
from torch import nn
from torch.nn import functional as F
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

PLAIN = "plain" in sys.argv


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(32, 128)
        self.hidden = nn.ModuleList(nn.Linear(128, 128) for _ in range(3))
        self.out = nn.Linear(128, 16)

    def forward(self, x):
        x = F.gelu(self.stem(x))
        for layer in self.hidden:
            x = x + F.gelu(layer(x))
        return self.out(x)


def main():
    torch.manual_seed(4)
    model = Tower()
    if not PLAIN:
        convert_to_float8_training(
            model, config=Float8LinearConfig(emulate=True), module_filter_fn=lambda _, name: name.startswith("hidden")
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    easy, hard = torch.randn(32, 16) / 6, torch.randn(32, 16)
    losses = []
    for _ in range(180):
        x = torch.randn(128, 32)
        y = torch.tanh(x @ easy)
        if torch.rand(()) < 1 / 15:
            y = torch.sin(x @ hard) * 3 + torch.randn(128, 16)
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    print(f"loss {sum(losses[-10:]) / 10:.4f}")


if __name__ == "__main__":
    main()
