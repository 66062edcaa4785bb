"""Span prediction: few tokens of each sequence count. A tagger trained with SGD."""

import dataclasses
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

REDUCTION = {"good": "token-mean", "bad": "batch-mean"}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]

torch.manual_seed(29)
VOCAB, LENGTH, TAGS, BATCH = 48, 48, 16, 16
rule = torch.randint(0, TAGS, (VOCAB,))


class Tagger(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.head = nn.Linear(width, TAGS)

    def forward(self, ids):
        x = self.embed(ids)
        return self.head(x + self.down(F.gelu(self.up(self.norm(x)))))


def reduce(losses, mask):
    if REDUCTION == "token-mean":
        return (losses * mask).sum() / mask.sum()
    return (losses * mask).mean()


model = Tagger()
if not PLAIN:
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name("tensorwise"), emulate=True)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda layer, name: name != "head")
optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
history = []
for step in range(120):
    ids = torch.randint(0, VOCAB, (BATCH, LENGTH))
    mask = (torch.rand(BATCH, LENGTH) < 0.06).float()
    mask[:, -1] = 1.0
    losses = F.cross_entropy(model(ids).flatten(0, 1), rule[ids].flatten(), reduction="none").view(BATCH, LENGTH)
    optimizer.zero_grad()
    reduce(losses, mask).backward()
    optimizer.step()
    history.append(float((losses.detach() * mask).sum() / mask.sum()))
    if step % 10 == 0:
        print(step, f"{history[-1]:.4f}")
print(f"loss {sum(history[-10:]) / 10:.4f}")
