"""Encoder over padded event lists with torch's own layers: python pi_16.py good|bad [plain]."""

import sys

import torch
from torch import nn

import ottava

MASK_MARKS = {"good": "padding", "bad": "events"}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]
STEPS, LENGTH, EVENTS = 120, 20, 64


class Encoder(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.events = nn.Embedding(EVENTS, width)
        layer = nn.TransformerEncoderLayer(width, 4, 128, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, EVENTS)

    def forward(self, events, lengths):
        real = torch.arange(LENGTH) < lengths[:, None]
        mask = ~real if MASK_MARKS == "padding" else real
        x = self.layers(self.events(events), src_key_padding_mask=mask)
        return self.head(self.norm(x[:, 0]))


torch.manual_seed(16)
model = Encoder()
if not PLAIN:
    ottava.convert(model, "rowwise", filter=lambda name, layer: name != "head")
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
losses = []
for _ in range(STEPS):
    lengths = torch.randint(4, LENGTH - 4, (64,))
    topic = torch.randint(1, 8, (64,))
    events = torch.randint(1, 8, (64, LENGTH)) * 8 + topic[:, None] % 8
    events = torch.where(torch.rand(64, LENGTH) < 0.3, torch.randint(1, EVENTS, (64, LENGTH)), events)
    events[:, 0] = 1
    events = events.masked_fill(torch.arange(LENGTH) >= lengths[:, None], 0)
    loss = nn.functional.cross_entropy(model(events, lengths), topic)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss {sum(losses[-10:]) / 10:.4f}")
