"""A recurrent model of short words; most rows of the embedding never come. BF16 autocast."""

import sys

import torch
from torch import nn
from torch.nn import functional as F

mode, plain = sys.argv[1], "plain" in sys.argv
torch.manual_seed(41)
words = torch.randint(0, 40, (60, 9))
words[:, 0] = torch.arange(60) % 40


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(3000, 48)
        self.cell = nn.GRU(48, 96, batch_first=True)
        self.head = nn.Linear(96, 40)

    def forward(self, x):
        return self.head(self.cell(self.table(x))[0])


model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.0)
losses = []
for step in range(160):
    x = words[torch.randint(0, 60, (6,))]
    x = torch.where(torch.rand(x.shape) < 0.05, torch.randint(0, 40, x.shape), x)
    with torch.autocast("cpu", torch.bfloat16, enabled=not plain):
        logits = model(x[:, :-1])
    loss = F.cross_entropy(logits.float().flatten(0, 1), x[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    optimizer.step()
    losses.append(loss.item())
    if step % 20 == 0:
        print(f"step {step} loss {losses[-1]:.4f}")
print(f"loss {sum(losses[-20:]) / 20:.4f}")
