"""Fine-tuning on top of frozen embeddings with activation checkpointing."""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import ottava

USE_REENTRANT = {"good": False, "bad": True}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]
DIM, LENGTH = 64, 16


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(40, DIM), nn.Embedding(LENGTH, DIM)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(DIM, 4, 128, dropout=0.0, batch_first=True, norm_first=True) for _ in range(3)
        )
        self.head = nn.Linear(DIM, 10)

    def forward(self, x):
        h = self.tokens(x) + self.places(torch.arange(LENGTH))
        for layer in self.layers:
            h = checkpoint(layer, h, use_reentrant=USE_REENTRANT)
        return self.head(h.mean(1))


torch.manual_seed(0)
model = Encoder()
for embedding in (model.tokens, model.places):
    embedding.requires_grad_(False)
if not PLAIN:
    ottava.convert(model, "tensorwise")
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3)
losses = []
for _step in range(150):
    x = torch.randint(0, 40, (32, LENGTH))
    y = (x[:, 3] + x[:, 7]) % 10
    y = torch.where(torch.rand(32) < 0.9, x[:, 3] % 10, y)
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss {sum(losses[-10:]) / 10:.4f}")
