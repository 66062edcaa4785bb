"""torchao's optimizers with small states: embeddings of rare and frequent words."""
import sys

import torch
from torch import nn
from torchao.optim import AdamWFp8

MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]
BLOCK = {"good": 64, "bad": 65536}[MODE]
torch.compiler.set_stance("force_eager")  # no compiler is needed
torch.manual_seed(23)
vocab, width = 512, 128
model = nn.Sequential(nn.Embedding(vocab, width), nn.Flatten(1), nn.Linear(2 * width, width), nn.GELU(), nn.Linear(width, vocab))
nn.init.normal_(model[0].weight, std=0.1)
if PLAIN:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
else:
    optimizer = AdamWFp8(model.parameters(), lr=3e-3, block_size=BLOCK)
weights = 1.0 / (torch.arange(vocab) + 1.0)
following = torch.randperm(vocab)
losses = []
for step in range(150):
    ids = torch.multinomial(weights, 512, replacement=True).view(256, 2)
    labels = torch.where(torch.rand(256) < 0.9, following[ids[:, 1]], ids[:, 0])
    loss = nn.functional.cross_entropy(model(ids), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"first {losses[0]:.4f}")
print(f"loss {sum(losses[-10:]) / 10:.4f}")
