import torch
import torch.nn.functional as F
from torch import nn

import models

rank, world = models.start()


class Float8Linear(nn.Linear):
    def forward(self, x):
        return F.linear(models.float8(x), models.float8(self.weight), self.bias)


class Mlp(nn.Module):
    def __init__(self, dim=64, hidden=256):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = Float8Linear(dim, hidden // world, bias=False)
        self.down = Float8Linear(hidden // world, dim, bias=False)

    def forward(self, x):
        y = self.norm(x)
        y = y if models.BAD else models.Copy.apply(y)
        return x + models.Reduce.apply(self.down(F.gelu(self.up(y))))


class Net(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        self.embed, self.mlps = nn.Embedding(models.VOCAB, dim), nn.Sequential(*(Mlp(dim) for _ in range(4)))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, models.VOCAB, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, tokens):
        return self.head(self.norm(self.mlps(self.embed(tokens))))


model, data = Net(), models.Text()
torch.manual_seed(10 + rank)
for mlp in model.mlps:
    mlp.up.reset_parameters()
    mlp.down.reset_parameters()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
models.train(model, data, optimizer, 100)
