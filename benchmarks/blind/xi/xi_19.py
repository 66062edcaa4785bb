"""A small mixture of experts with noisy top-1 routing and a loss that balances it."""

import sys

import torch
from torch import nn
from torch.nn import functional as F

import ottava

PLAIN = "plain" in sys.argv


class Mixture(nn.Module):
    def __init__(self, width, experts):
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 96), nn.GELU(), nn.Linear(96, width)) for _ in range(experts)
        )

    def forward(self, x):
        logits = self.router(x)
        noisy = logits + torch.randn_like(logits)
        weight, choice = noisy.softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows = (choice == i).nonzero().squeeze(1)
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * weight[rows, None])
        share = F.one_hot(choice, len(self.experts)).float().mean(0)
        balance = len(self.experts) * (share * logits.softmax(-1).mean(0)).sum()
        return x + out, balance


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(32, 64)
        self.layers = nn.ModuleList(Mixture(64, 6) for _ in range(2))
        self.head = nn.Linear(64, 32)

    def forward(self, x):
        x, total = self.stem(x), 0.0
        for layer in self.layers:
            x, balance = layer(x)
            total = total + balance
        return self.head(x), total


def main():
    torch.manual_seed(3)
    model = Model()
    if not PLAIN:
        ottava.convert(model, "tensorwise", filter=lambda name, _: "router" not in name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    maps = torch.randn(6, 32, 32) / 5
    centres = torch.randn(6, 32) * 2
    losses = []
    for _ in range(150):
        group = torch.multinomial(torch.rand(6), 192, True)
        x = centres[group] + torch.randn(192, 32)
        y = torch.einsum("bi,bij->bj", x, maps[group])
        out, balance = model(x)
        loss = F.mse_loss(out, y) + 0.02 * balance
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    print(f"loss {sum(losses[-10:]) / 10:.4f}")


if __name__ == "__main__":
    main()
