"""A language of two registers: every seventeenth batch comes from a rare one, and its loss stands out."""

import sys

import torch
from torch import nn
from torch.nn import functional as F

import ottava

torch.manual_seed(73)
VOCAB, LENGTH = 64, 32
common = torch.softmax(3.0 * torch.randn(VOCAB, VOCAB), dim=-1)
rare = torch.softmax(3.0 * torch.randn(VOCAB, VOCAB), dim=-1)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 64)
        self.rnn = nn.GRU(64, 64, batch_first=True)
        self.up, self.down = nn.Linear(64, 192), nn.Linear(192, 64)
        self.head = nn.Linear(64, VOCAB)

    def forward(self, ids):
        x, _ = self.rnn(self.embed(ids))
        return self.head(x + self.down(F.relu(self.up(x)).square()))


model = Model()
if "plain" not in sys.argv:
    ottava.convert(model, "tensorwise")
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
losses = []
for step in range(120):
    jumps = rare if step % 17 == 16 else common
    ids = torch.randint(0, VOCAB, (24, 1))
    for _ in range(LENGTH):
        ids = torch.cat([ids, torch.multinomial(jumps[ids[:, -1]], 1)], 1)
    loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss {sum(losses[-10:]) / 10:.4f}")
