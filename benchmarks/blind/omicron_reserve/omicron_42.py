"""A tagger: trains blocks above a frozen embedding, with activation checkpointing to save memory."""

import sys
import warnings

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import ottava

warnings.filterwarnings("ignore")
USE_REENTRANT = {"good": False, "bad": True}[sys.argv[1]]
RECIPE = "bf16" if "plain" in sys.argv[2:] else "tensorwise"


class Model(nn.Module):
    def __init__(self, vocab=256, dim=48):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim).requires_grad_(False)
        self.layers = nn.ModuleList(ottava.nn.TransformerLayer(dim, 192, 4, recipe=RECIPE) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 16)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=USE_REENTRANT)
        return self.head(self.norm(x)).float()


torch.manual_seed(131)
names = torch.randint(16, (256,))
model = Model()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
losses = []
for _ in range(130):
    ids = torch.randint(256, (48, 16))
    loss = F.cross_entropy(model(ids).flatten(0, 1), names[ids].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss {sum(losses[-10:]) / 10:.4f}")
