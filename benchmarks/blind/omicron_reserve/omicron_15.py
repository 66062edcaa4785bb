"""A decoder with a head tied to its embedding, on a second-order chain; FP8 in the layers."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

import ottava

EMBED_STD = {"good": 0.02, "bad": None}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]
VOCAB, DIM = 96, 96


class Decoder(nn.Module):
    def __init__(self, recipe):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.position = nn.Embedding(32, DIM)
        self.layers = nn.ModuleList(ottava.nn.TransformerLayer(DIM, 192, 4, recipe=recipe) for _ in range(2))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        if EMBED_STD is not None:
            nn.init.normal_(self.embed.weight, std=EMBED_STD)
            nn.init.normal_(self.position.weight, std=EMBED_STD)

    def forward(self, ids):
        x = self.embed(ids) + self.position.weight[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


torch.manual_seed(17)
table = torch.softmax(3 * torch.randn(VOCAB, VOCAB), -1)
model = Decoder("bf16" if PLAIN else "tensorwise")
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
losses = []
for _ in range(120):
    ids = [torch.randint(VOCAB, (32,))]
    for _ in range(24):
        ids.append(torch.multinomial(table[ids[-1]], 1)[:, 0])
    ids = torch.stack(ids, 1)
    loss = F.cross_entropy(model(ids[:, :-1]).float().flatten(0, 1), ids[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    losses.append(loss.item())
print(f"loss {sum(losses[-10:]) / 10:.4f}")
