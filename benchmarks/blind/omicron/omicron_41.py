"""A character model of the sources of the standard library, read in shards."""

import inspect
import sys
import textwrap

import torch
import torch.nn.functional as F
from torch import nn

import ottava

VOCAB_OF = {"good": "corpus", "bad": "shard"}[sys.argv[1]]
RECIPE = "bf16" if "plain" in sys.argv[2:] else "rowwise"


def tokenize(shards, vocab_of):
    everything = sorted(set("".join(shards)))
    streams = []
    for text in shards:
        alphabet = everything if vocab_of == "corpus" else sorted(set(text))
        index = {char: i for i, char in enumerate(alphabet)}
        streams.append(torch.tensor([index[char] for char in text]))
    return streams, len(everything)


class Model(nn.Module):
    def __init__(self, vocab, dim=96):
        super().__init__()
        self.embed, self.position = nn.Embedding(vocab, dim), nn.Embedding(32, dim)
        self.layers = nn.ModuleList(ottava.nn.TransformerLayer(dim, 192, 4, recipe=RECIPE) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab)

    def forward(self, ids):
        x = self.embed(ids) + self.position.weight[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)).float()


source = inspect.getsource(textwrap) + inspect.getsource(inspect)[:60000]
size = 1500
shards = [source[start : start + size] for start in range(0, len(source) - size, size)]
streams, vocab = tokenize(shards, VOCAB_OF)
torch.manual_seed(101)
model = Model(vocab)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
losses = []
for _ in range(150):
    rows = []
    for which in torch.randint(len(streams), (24,)).tolist():
        start = int(torch.randint(size - 33, ()))
        rows.append(streams[which][start : start + 33])
    ids = torch.stack(rows)
    loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    losses.append(loss.item())
print(f"loss {sum(losses[-10:]) / 10:.4f}")
