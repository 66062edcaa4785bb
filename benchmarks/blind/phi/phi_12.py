"""Continued pretraining: after step 45 the text comes from another domain. ottava, mxfp8."""

import os
import sys

import torch
import torch.nn.functional as F
from torch import nn

import ottava

plain = "plain" in sys.argv[2:]
SEED = int(os.environ.get("SEED", 0))
torch.manual_seed(SEED)
VOCAB, WIDTH, LENGTH, BATCH, STEPS, SWITCH = 96, 64, 24, 16, 95, 45


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCAB, WIDTH), nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        layer = dict(d_model=WIDTH, nhead=4, dim_feedforward=128, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(**layer) for _ in range(2))
        self.norm, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, ids):
        x = self.embed(ids) + self.position
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.lm_head(self.norm(x))


domains = [torch.randint(0, VOCAB, (VOCAB, n)) for n in (2, 4)]


def batch(following):
    ids = torch.randint(0, VOCAB, (BATCH, 1))
    for _ in range(LENGTH):
        pick = torch.randint(0, following.shape[1], (BATCH, 1))
        ids = torch.cat([ids, following[ids[:, -1:], pick]], 1)
    return ids


model = Model()
if not plain:
    ottava.convert(model, "mxfp8")
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
losses = []
for step in range(STEPS):
    ids = batch(domains[step >= SWITCH])
    loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    losses.append(loss.item())
    if step % 10 == 0:
        print(step, losses[-1])
print("final loss", sum(losses[-10:]) / 10)
