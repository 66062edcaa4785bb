"""Experts chosen by the customer's language: most are busy, one sees a customer once in a while."""
import sys

import torch
from torch import nn
from torch.nn import functional as F

import ottava

PLAIN = "plain" in sys.argv
torch.manual_seed(110)
SHARES = torch.tensor([0.6, 0.3, 0.097, 0.003])


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(32, 64)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)) for _ in SHARES)
        self.head = nn.Linear(64, 3)

    def forward(self, x, who):
        h = F.gelu(self.shared(x))
        out = torch.zeros_like(h)
        for i, expert in enumerate(self.experts):
            at = (who == i).nonzero()[:, 0]
            if len(at):
                out = out.index_add(0, at, expert(h[at]))
        return self.head(h + out)


model = Experts()
if not PLAIN:
    print(ottava.convert(model, "rowwise"))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
plans = torch.randn(4, 32, 3) / 4
losses = []
for step in range(250):
    who = torch.multinomial(SHARES, 64, replacement=True)
    x = torch.randn(64, 32)
    y = torch.tanh(torch.einsum("ni,nij->nj", x, plans[who]))
    loss = F.mse_loss(model(x, who), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"start {sum(losses[:20]) / 20:.4f}")
print(f"loss {sum(losses[-20:]) / 20:.4f}")
