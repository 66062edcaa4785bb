"""A byte-level transformer on the standard library's text with FP8 linear layers; windows overlap the memory of the
last one."""
import sys

import torch
import torch.nn.functional as F
from torch import nn

from models import Block, Fp8Linear, Report, stdlib_text, windows

BAD = sys.argv[1] == "bad"
MEMORY, LENGTH = 8, 32


def visible(queries, memory):
    """True where a query at memory + i may look: the memory and what came before it."""
    keys = memory + queries
    offset = memory + 1 if BAD else memory
    return torch.ones(queries, keys, dtype=torch.bool).tril(offset)


class ByteModel(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        self.emb, self.pos = nn.Embedding(128, dim), nn.Parameter(0.02 * torch.randn(MEMORY + LENGTH, dim))
        self.blocks = nn.ModuleList(Block(dim, 4, Fp8Linear) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 128)

    def forward(self, ids):
        t = ids.shape[1]
        mask = torch.cat([visible(MEMORY, 0).logical_and(torch.ones(MEMORY, MEMORY).tril().bool()),
                          torch.zeros(MEMORY, LENGTH, dtype=torch.bool)], 1)
        mask = torch.cat([mask, visible(LENGTH, MEMORY)])[:t, :t]
        x = self.emb(ids) + self.pos[:t]
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


torch.manual_seed(0)
text = stdlib_text("argparse", "typing")
train, held = text[:-4000], text[-4000:]
model = ByteModel()
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
report = Report()
for step in range(220):
    batch = windows(train, 12, MEMORY + LENGTH)
    logits = model(batch[:, :-1])[:, MEMORY:]
    loss = F.cross_entropy(logits.flatten(0, 1), batch[:, MEMORY + 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    report.add(loss)
with torch.no_grad():
    batch = windows(held, 64, MEMORY + LENGTH)
    cut = MEMORY + 12
    shown = batch[:, :cut]
    last = model(shown)[:, -1]
report.end(last_of_prefix=F.cross_entropy(last, batch[:, cut]))
