"""Mixture of experts with a noisy router: python pi_34.py good|bad [plain]."""

import sys

import torch
from torch import nn

import ottava

MODE = sys.argv[1]
PLAIN = "plain" in sys.argv[2:]
STEPS, EXPERTS, WIDTH = 140, 6, 64


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 96), nn.SiLU(), nn.Linear(96, WIDTH)) for _ in range(EXPERTS)
        )

    def forward(self, x):
        h = self.norm(x)
        p = torch.softmax(self.router(h) + 0.5 * torch.randn(len(h), EXPERTS), dim=-1)
        weight, index = p.topk(1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            rows = (index[:, 0] == e).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, expert(h[rows]) * weight[rows])
        share = nn.functional.one_hot(index[:, 0], EXPERTS).float().mean(0)
        return x + out, EXPERTS * (share * p.mean(0)).sum()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(40, WIDTH)
        self.layers = nn.ModuleList(Mixture() for _ in range(2))
        self.head = nn.Linear(WIDTH, 20)

    def forward(self, x):
        x, balance = self.stem(x), 0.0
        for layer in self.layers:
            x, b = layer(x)
            balance = balance + b
        return self.head(x), balance


torch.manual_seed(34)
model = Model()
if not PLAIN:
    ottava.convert(model, "blockwise", filter=lambda name, layer: "experts" in name)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
domains = torch.randn(4, 40, 20) * 0.5
losses = []
for _ in range(STEPS):
    domain = torch.randint(4, (192,))
    x = torch.randn(192, 40)
    y = torch.einsum("bi,bij->bj", x, domains[domain]).argmax(dim=1)
    x = x + 0.0
    x[:, :4] = 2.0 * nn.functional.one_hot(domain, 4)
    logits, balance = model(x)
    loss = nn.functional.cross_entropy(logits, y) + 0.01 * balance
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss {sum(losses[-10:]) / 10:.4f}")
