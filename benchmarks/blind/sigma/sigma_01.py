"""Experts chosen by domain: one domain appears only after half of the run. ottava's tensorwise casts."""
import os
import sys

import ottava
import torch
from torch import nn
from torch.nn import functional as F

SEED = int(os.environ.get("SEED", "0"))
PLAIN = "plain" in sys.argv[2:]


class Net(nn.Module):
    def __init__(self, dim=64, experts=4):
        super().__init__()
        self.stem = nn.Linear(32, dim)
        self.router = nn.Linear(dim, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 96), nn.SiLU(), nn.Linear(96, dim)) for _ in range(experts)
        )
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 12)

    def forward(self, x):
        h = self.stem(x)
        gate, choice = self.router(h).softmax(-1).max(-1)
        out = torch.zeros_like(h)
        for i, expert in enumerate(self.experts):
            where = (choice == i).nonzero().squeeze(-1)
            if len(where):
                out = out.index_add(0, where, gate[where, None] * expert(h[where]))
        return self.head(self.norm(h + out))


torch.manual_seed(SEED)
net = Net()
if not PLAIN:
    ottava.convert(net, "tensorwise", filter=lambda name, m: name not in ("router", "head"))
centers = torch.randn(4, 12, 32) + 2.5 * torch.randn(4, 1, 32)
optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
tail = []
for step in range(100):
    domain = torch.randint(0, 3 if step < 50 else 4, (96,))
    y = torch.randint(0, 12, (96,))
    x = centers[domain, y] + 0.6 * torch.randn(96, 32)
    loss = F.cross_entropy(net(x), y)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    tail.append(loss.item())
    if step % 10 == 0:
        print(step, round(loss.item(), 4))
print(f"final loss {sum(tail[-10:]) / 10:.4f}")
