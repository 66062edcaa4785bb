"""Language-like token prediction with FP16-style loss scaling and SGD."""
import os
import sys

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import ottava

mode = sys.argv[1]
plain = "plain" in sys.argv[2:]
seed = int(os.environ.get("SEED", 0))
torch.manual_seed(seed)

VOCAB, CONTEXT, STEPS, BATCH = 64, 4, 180, 256
chain = torch.softmax(3.5 * torch.randn(VOCAB, VOCAB), -1)


def batch():
    rows = [torch.randint(0, VOCAB, (BATCH,))]
    for _ in range(CONTEXT):
        rows.append(torch.multinomial(chain[rows[-1]], 1).squeeze(1))
    tokens = torch.stack(rows, 1)
    return tokens[:, :-1], tokens[:, -1]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 48)
        self.up = nn.Linear(48 * CONTEXT, 192)
        self.mid = nn.Linear(192, 128)
        self.norm = nn.LayerNorm(128)
        self.head = nn.Linear(128, VOCAB)

    def forward(self, tokens):
        h = F.gelu(self.up(self.embed(tokens).flatten(1)))
        return self.head(self.norm(F.gelu(self.mid(h))))


model = Model()
if not plain:
    ottava.convert(model, "guarded")
optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=100)
losses = []
for step in range(STEPS):
    tokens, targets = batch()
    loss = F.cross_entropy(model(tokens), targets)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    if mode == "good":
        scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())
    if step % 20 == 0:
        print(f"step {step} loss {loss.item():.4f} scale {scaler.get_scale():.0f}")
print(f"final loss {np.mean(losses[-20:]):.4f}")
