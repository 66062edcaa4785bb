import torch
import torch.nn.functional as F
from torch import nn

import models

torch.manual_seed(0)


class Switch(nn.Module):
    def __init__(self, dim=64, experts=8):
        super().__init__()
        self.router = nn.Linear(dim, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim)) for _ in range(experts)
        )

    def forward(self, x):
        flat = x.flatten(0, 1)
        odds = self.router(flat).softmax(-1)
        top, chosen = odds.max(-1)
        out = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            rows = (chosen == i).nonzero().squeeze(1)
            if len(rows):
                out = out.index_add(0, rows, expert(flat[rows]) * top[rows, None])
        load = F.one_hot(chosen, len(self.experts)).float().mean(0)
        self.balance = len(self.experts) * (load * odds.mean(0)).sum()
        return out.view_as(x)


model, data = models.Gpt(), models.Text()
for block in model.blocks:
    block.up, block.down = Switch(), nn.Identity()
models.fp8(model, "rowwise")
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for step in range(1, 81):
    loss = models.lm_loss(model, data.batch())
    total = loss + 0.01 * sum(block.up.balance for block in model.blocks)
    optimizer.zero_grad()
    total.backward()
    optimizer.step()
    models.say(step, loss)
