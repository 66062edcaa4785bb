"""Sequence classification with a GRU over padded batches of event logs."""
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
rng = np.random.default_rng(seed)

VOCAB, CLASSES, LONGEST, STEPS, BATCH, PAD = 40, 8, 48, 160, 64, 0


def batch():
    lengths = rng.integers(5, 20, BATCH)
    lengths[rng.integers(0, BATCH)] = LONGEST
    events = np.full((BATCH, LONGEST), PAD)
    labels = rng.integers(0, CLASSES, BATCH)
    for i, n in enumerate(lengths):
        row = rng.integers(CLASSES + 1, VOCAB, n)
        marks = rng.choice(n, 2, replace=False)
        row[marks[0]] = 1 + labels[i]
        row[marks[1]] = 1 + labels[i]
        events[i, :n] = row
    return torch.as_tensor(events), torch.as_tensor(lengths), torch.as_tensor(labels)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 64)
        self.inner = nn.Linear(64, 64)
        self.gru = nn.GRU(64, 64, batch_first=True)
        self.head = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, CLASSES))

    def forward(self, events, lengths):
        hidden, _ = self.gru(F.gelu(self.inner(self.embed(events))))
        if mode == "bad":
            last = hidden[:, -1]
        else:
            last = hidden[torch.arange(len(lengths)), lengths - 1]
        return self.head(last)


model = Classifier()
if not plain:
    ottava.convert(model, "blockwise")
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
losses = []
for step in range(STEPS):
    events, lengths, labels = batch()
    loss = F.cross_entropy(model(events, lengths), labels)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    losses.append(loss.item())
    if step % 20 == 0:
        print(f"step {step} loss {loss.item():.4f}")
print(f"final loss {np.mean(losses[-20:]):.4f}")
