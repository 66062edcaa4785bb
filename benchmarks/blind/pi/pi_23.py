"""A pre-norm transformer on lists to sort: python pi_23.py good|bad [plain]."""

import sys

import torch
from torch import nn

import ottava

NORM_EPS = {"good": 1e-6, "bad": 10.0}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]
STEPS, WIDTH, COUNT = 140, 64, 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.RMSNorm(WIDTH, eps=NORM_EPS), nn.RMSNorm(WIDTH, eps=NORM_EPS)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 128, bias=False), nn.Linear(128, WIDTH, bias=False)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.one(x)).view(b, t, 3, 4, 16).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, WIDTH))
        return x + self.down(nn.functional.silu(self.up(self.two(x))))


class Sorter(nn.Module):
    def __init__(self):
        super().__init__()
        self.values, self.places = nn.Embedding(32, WIDTH), nn.Embedding(COUNT, WIDTH)
        for table in (self.values, self.places):
            nn.init.normal_(table.weight, std=0.1)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm, self.head = nn.RMSNorm(WIDTH, eps=NORM_EPS), nn.Linear(WIDTH, 32, bias=False)

    def forward(self, x):
        return self.head(self.norm(self.blocks(self.values(x) + self.places.weight)))


torch.manual_seed(40)
model = Sorter()
if not PLAIN:
    ottava.convert(model, "mxfp8", filter=lambda name, layer: name != "head")
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
losses = []
for _ in range(STEPS):
    x = torch.randint(32, (96, COUNT))
    loss = nn.functional.cross_entropy(model(x).flatten(0, 1), x.sort(dim=1).values.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss {sum(losses[-10:]) / 10:.4f}")
