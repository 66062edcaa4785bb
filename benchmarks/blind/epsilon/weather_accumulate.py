"""A forecast of 12 hours from 48, small batches summed to a large one, torchao's FP8 training."""
import torch
import torch.nn.functional as F
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from models import Block, Report


class Forecast(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        self.enter = nn.Linear(16, dim)
        self.pos = nn.Parameter(0.02 * torch.randn(12, dim))
        self.blocks = nn.ModuleList(Block(dim, 4) for _ in range(2))
        self.leave = nn.Linear(dim, 12)

    def forward(self, x):
        h = self.enter(x.unflatten(1, (12, 4)).flatten(2)) + self.pos
        for block in self.blocks:
            h = block(h)
        return self.leave(h.mean(1))


def draw(n):
    hour = torch.arange(60.0)[None, :, None]
    phase, period = 6.3 * torch.rand(n, 1, 4), 20 + 4 * torch.rand(n, 1, 4)
    x = torch.sin(6.3 * hour / period + phase) + 0.1 * torch.randn(n, 60, 4)
    return x[:, :48], x[:, 48:, 0]


torch.manual_seed(0)
model = Forecast()
convert_to_float8_training(model, config=Float8LinearConfig(emulate=True),
                           module_filter_fn=lambda m, name: name.startswith("blocks"))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
SMALL, report = 4, Report()
for step in range(60):
    optimizer.zero_grad()
    total = 0.0
    for _ in range(SMALL):
        x, y = draw(24)
        loss = F.mse_loss(model(x), y) / SMALL
        loss.backward()
        total += loss.item()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    report.add(total)
report.end()
