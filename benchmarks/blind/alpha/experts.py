"""A mixture of 4 experts, top 2, with a load-balancing loss, under MXFP8."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

import ottava
from models import MLP

assert sys.argv[1] == "good"
torch.manual_seed(20)


class Experts(nn.Module):
    def __init__(self, width=64, experts=4):
        super().__init__()
        self.norm, self.router = nn.LayerNorm(width), nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(MLP(width, 2 * width, width) for _ in range(experts))

    def forward(self, x):
        h = self.norm(x)
        p = self.router(h).softmax(-1)
        weight, index = p.topk(2, -1)
        weight = weight / weight.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            row, slot = torch.where(index == e)
            if len(row):
                out.index_add_(0, row, expert(h[row]) * weight[row, slot, None])
        share = F.one_hot(index[:, 0], p.shape[1]).float().mean(0)
        return x + out, p.shape[1] * (share * p.mean(0)).sum()


embed, layers, head = nn.Linear(32, 64), nn.ModuleList(Experts() for _ in range(2)), nn.Linear(64, 32)
model = nn.ModuleList([embed, layers, head])
ottava.convert(model, "mxfp8")
opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
maps = torch.randn(4, 32, 32) / 32**0.5
for step in range(60):
    x, kind = torch.randn(128, 32), torch.randint(4, (128,))
    x[:, 0] = 2.0 * (kind % 2) - 1
    x[:, 1] = 2.0 * (kind // 2) - 1
    y = torch.einsum("nij,nj->ni", maps[kind], x)
    h, balance = embed(x), 0.0
    for layer in layers:
        h, b = layer(h)
        balance = balance + b
    loss = (head(h) - y).square().mean() + 0.01 * balance
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    if step % 10 == 9:
        print(f"step {step} loss {loss.item():.4f}", flush=True)
