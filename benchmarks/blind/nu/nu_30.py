"""Mixture of experts with top-1 routing and a balance loss; routing flips make the loss uneven."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

import ottava

PLAIN = "plain" in sys.argv[2:]
EXPERTS, DIM = 4, 64


class Moe(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(DIM, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(DIM, 128), nn.GELU(), nn.Linear(128, DIM)) for _ in range(EXPERTS)
        )

    def forward(self, x):
        p = self.router(x + 0.1 * torch.randn_like(x)).softmax(-1)
        gate, index = p.max(-1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (index == number).nonzero().squeeze(1)
            if len(rows):
                y = y.index_add(0, rows, expert(x[rows]) * gate[rows, None])
        share = F.one_hot(index, EXPERTS).float().mean(0)
        return x + y, EXPERTS * (share * p.mean(0)).sum()


torch.manual_seed(0)
model = nn.ModuleDict({"inlet": nn.Linear(16, DIM), "one": Moe(), "two": Moe(), "head": nn.Linear(DIM, 24)})
if not PLAIN:
    ottava.convert(model, "rowwise", filter=lambda name, layer: "experts" in name)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
centers = torch.randn(6, 16) * 2
teachers = torch.randn(6, 16, 24)
losses = []
for _step in range(160):
    group = torch.randint(0, 6, (192,))
    noise = torch.randn(192, 16)
    y = torch.einsum("bi,bio->bo", noise, teachers[group]).argmax(1)
    h, aux1 = model["one"](model["inlet"](centers[group] + noise))
    h, aux2 = model["two"](h)
    loss = F.cross_entropy(model["head"](h), y) + 0.02 * (aux1 + aux2)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss {sum(losses[-10:]) / 10:.4f}")
