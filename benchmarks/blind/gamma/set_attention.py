"""Attention over clouds of points tells how they are spread; both products of attention take FP8 operands."""

import torch
import torch.nn.functional as F
from torch import nn

from models import cast8, learn, start, to8

bad = start()
points, gain = 1536, 1.0 if bad else 256.0


class Pool(nn.Module):
    def __init__(self, width, queries):
        super().__init__()
        self.queries = nn.Parameter(0.1 * torch.randn(queries, width))
        self.key, self.value, self.out = (
            nn.Linear(width, width),
            nn.Linear(width, width),
            nn.Linear(queries * width, 64),
        )

    def forward(self, x):
        k, v = self.key(x), self.value(x)
        scores = cast8(self.queries) @ cast8(k).transpose(1, 2) / k.shape[-1] ** 0.5
        p = torch.softmax(scores, -1)
        p = p + (to8(p * gain) / gain - p).detach()
        return self.out((p @ cast8(v)).flatten(1))


model = nn.Sequential(nn.Linear(2, 32), nn.GELU(), Pool(32, 4), nn.GELU(), nn.Linear(64, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(150):
    spread = 0.3 + 1.2 * torch.rand(16, 1, 2)
    x = spread * torch.randn(16, points, 2)
    loss = F.mse_loss(model(x), spread[:, 0]) * 10
    learn(step, optimizer, loss)
