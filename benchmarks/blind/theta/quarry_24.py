"""torch's own encoder on padded sequences: which symbol is the majority?"""
import sys

import torch
from torch import nn

MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]
MASK = {"good": torch.ge, "bad": torch.lt}[MODE]
torch.manual_seed(56)
vocab, width, length, classes = 32, 64, 32, 8


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.query = nn.Embedding(vocab + 1, width), nn.Parameter(torch.randn(1, 1, width) / 8)
        layer = nn.TransformerEncoderLayer(width, 4, 128, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(width, classes)

    def forward(self, ids, sizes):
        x = torch.cat([self.query.expand(len(ids), -1, -1), self.embed(ids)], 1)
        place = torch.arange(length).expand(len(ids), -1)
        mask = MASK(place, sizes[:, None])
        mask = torch.cat([torch.zeros(len(ids), 1, dtype=torch.bool), mask], 1)
        return self.out(self.encoder(x, src_key_padding_mask=mask)[:, 0])


model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
losses = []
for step in range(130):
    sizes = torch.randint(4, length - 3, (32,))
    main = torch.randint(classes, (32,))
    ids = torch.where(torch.rand(32, length) < 0.5, main[:, None], torch.randint(vocab, (32, length)))
    ids = torch.where(torch.arange(length) < sizes[:, None], ids, vocab)
    loss = nn.functional.cross_entropy(model(ids, sizes), main)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"first {losses[0]:.4f}")
print(f"loss {sum(losses[-10:]) / 10:.4f}")
