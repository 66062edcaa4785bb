"""Click prediction with hashed features of a long tail: sparse gradients for the tables, Adagrad, tiny batches."""
import os
import sys

import torch
import torch.nn as nn
import torch.nn.functional as F

mode, plain = sys.argv[1], "plain" in sys.argv
torch.manual_seed(int(os.environ.get("SEED", 0)))
ROWS, FIELDS, DIM, BATCH, STEPS = 5000, 6, 16, 24, 200


class Clicks(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(ROWS, DIM, sparse=True)
        self.wide = nn.Embedding(ROWS, 1, sparse=True)
        nn.init.normal_(self.table.weight, std=0.05)
        nn.init.zeros_(self.wide.weight)
        self.deep = nn.Sequential(
            nn.Linear(FIELDS * DIM, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1)
        )

    def forward(self, ids):
        return (self.deep(self.table(ids).flatten(1)) + self.wide(ids).sum(1)).squeeze(-1)


taste = torch.randn(ROWS) * 1.5
often = 1.0 / torch.arange(1, ROWS + 1) ** 0.9


def batch():
    ids = torch.multinomial(often, BATCH * FIELDS, replacement=True).view(BATCH, FIELDS)
    logit = taste[ids].sum(1) * 0.6 - 1.5
    return ids, torch.bernoulli(logit.sigmoid())


model = Clicks()
sparse = [model.table.weight, model.wide.weight]
dense = list(model.deep.parameters())
optimizers = [torch.optim.Adagrad(sparse, lr=0.2), torch.optim.Adam(dense, lr=2e-3)]
losses = []
for step in range(STEPS):
    ids, y = batch()
    loss = F.binary_cross_entropy_with_logits(model(ids), y)
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    losses.append(loss.item())
    if step % 40 == 0:
        print(f"step {step} loss {loss.item():.4f}")
print(f"final loss {sum(losses[-40:]) / 40:.4f}")
