"""torch's own encoder on padded sequences, read off at its first token."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

import ottava

TRUE_MEANS = {"good": "ignore", "bad": "attend"}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]

torch.manual_seed(15)
VOCAB, LONGEST, CLASSES = 40, 32, 10
groups = torch.arange(VOCAB) % CLASSES


def batch(n=64):
    y = torch.randint(0, CLASSES, (n,))
    ids = torch.randint(2, VOCAB, (n, LONGEST))
    for i in range(n):
        own = (groups == y[i]).nonzero().flatten()
        own = own[own > 1]
        swap = torch.rand(LONGEST) < 0.35
        ids[i, swap] = own[torch.randint(0, len(own), (int(swap.sum()),))]
    lengths = torch.randint(10, LONGEST, (n, 1))
    ids[:, 0] = 1
    real = torch.arange(LONGEST) < lengths
    return ids * real, (~real if TRUE_MEANS == "ignore" else real), y


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, CLASSES)

    def forward(self, ids, mask):
        return self.head(self.encoder(self.embed(ids), src_key_padding_mask=mask)[:, 0])


model = Net()
if not PLAIN:
    ottava.convert(model, "tensorwise")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
losses = []
for step in range(100):
    ids, mask, y = batch()
    loss = F.cross_entropy(model(ids, mask), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 10 == 0:
        print(step, f"{losses[-1]:.4f}")
print(f"loss {sum(losses[-10:]) / 10:.4f}")
