"""A mixture of experts with top-2 routing, noise in the router and a loss that balances the load."""
import os
import sys

import torch
import torch.nn as nn
import torch.nn.functional as F
import ottava

mode, plain = sys.argv[1], "plain" in sys.argv
torch.manual_seed(int(os.environ.get("SEED", 0)))
DIM, EXPERTS, CLASSES, BATCH, STEPS = 64, 8, 32, 128, 150


class MoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(DIM, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(DIM, 128), nn.GELU(), nn.Linear(128, DIM)) for _ in range(EXPERTS)
        )

    def forward(self, x):
        logits = self.router(x)
        if self.training:
            logits = logits + torch.randn_like(logits)
        p = logits.softmax(-1)
        weight, index = p.topk(2, -1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            row, slot = (index == e).nonzero(as_tuple=True)
            if len(row):
                out = out.index_add(0, row, expert(x[row]) * weight[row, slot][:, None])
        load = F.one_hot(index[:, 0], EXPERTS).float().mean(0)
        return x + out, EXPERTS * (load * p.mean(0)).sum()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(24, DIM)
        self.moe1, self.moe2 = MoE(), MoE()
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, CLASSES)

    def forward(self, x):
        h, a = self.moe1(self.stem(x))
        h, b = self.moe2(h)
        return self.head(self.norm(h)), a + b


centers = torch.randn(200, 24)
labels = torch.randint(0, CLASSES, (200,))
often = 1.0 / torch.arange(1, 201)


def batch(step):
    which = torch.multinomial(often, BATCH, replacement=True)
    if step % 15 == 14:  # a batch of rare kinds alone
        which = torch.randint(120, 200, (BATCH,))
    return centers[which] + 0.3 * torch.randn(BATCH, 24), labels[which]


model = Net()
if not plain:
    ottava.convert(model, "tensorwise")
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
losses = []
for step in range(STEPS):
    x, y = batch(step)
    logits, balance = model(x)
    loss = F.cross_entropy(logits, y) + 0.01 * balance
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    losses.append(loss.item())
print(f"final loss {sum(losses[-20:]) / 20:.4f}")
