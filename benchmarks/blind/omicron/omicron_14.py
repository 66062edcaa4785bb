"""A torch encoder reads sentences of several lengths and answers from the first position."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

import ottava

MASK_IS = {"good": "padding", "bad": "tokens"}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]
PAD, CLS, VOCAB = 0, 1, 66


class Reader(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        layer = nn.TransformerEncoderLayer(dim, 4, 128, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(dim, 8)

    def forward(self, ids, mask):
        return self.head(self.encoder(self.embed(ids), src_key_padding_mask=mask)[:, 0])


torch.manual_seed(15)
words = torch.softmax(2.5 * torch.randn(8, VOCAB - 2), -1)
model = Reader()
if not PLAIN:
    ottava.convert(model, "tensorwise")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
losses = []
for _ in range(120):
    label = torch.randint(8, (32,))
    ids = 2 + torch.multinomial(words[label], 15, replacement=True)
    ids[torch.arange(15)[None] >= torch.randint(5, 15, (32, 1))] = PAD
    ids = torch.cat([torch.full((32, 1), CLS), ids], 1)
    mask = ids == PAD if MASK_IS == "padding" else ids != PAD
    loss = F.cross_entropy(model(ids, mask).float(), label)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss {sum(losses[-10:]) / 10:.4f}")
