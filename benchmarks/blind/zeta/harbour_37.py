"""Encoder and classifier for sequences; a running summary goes from chunk to chunk (truncated backpropagation)."""
import sys

import torch
from torch import nn
from torch.nn import functional as F

VARIANT = sys.argv[1]
torch.manual_seed(37)


class Chunks(nn.Module):
    def __init__(self):
        super().__init__()
        self.read = nn.Linear(32, 64)
        self.mix = nn.Linear(128, 64)
        self.head = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))

    def forward(self, chunks):
        state = torch.zeros(len(chunks), 64)
        for i in range(chunks.shape[1]):
            h = F.gelu(self.read(chunks[:, i]))
            state = torch.tanh(self.mix(torch.cat([h, state], 1)))
            if VARIANT == "bad" or i + 3 < chunks.shape[1]:
                state = state.detach()
        return self.head(state)


model = Chunks()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
codes = torch.randn(8, 32)
losses = []
for step in range(300):
    kind = torch.randint(0, 8, (64,))
    x = 2.5 * torch.randn(64, 6, 32)
    x[torch.arange(64), 3 + torch.randint(0, 3, (64,))] += 2.5 * codes[kind]
    loss = F.cross_entropy(model(x), kind)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss {sum(losses[-20:]) / 20:.4f}")
