"""torch's TransformerEncoder with a classification token, padded batches and an FP8 recipe."""

import sys

import torch
from torch import nn

import ottava

PADDING_IS = {"good": False, "bad": True}[sys.argv[1]]  # what the tokenizer's mask holds at a real token, handed on to torch
torch.manual_seed(13)
VOCAB, LENGTH, CLASSES = 80, 40, 8


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, CLASSES)

    def forward(self, ids, mask):
        return self.head(self.encoder(self.embed(ids), src_key_padding_mask=mask)[:, 0])


def batch(n=48):
    label = torch.randint(0, CLASSES, (n,))
    ids = torch.randint(2, VOCAB, (n, LENGTH))
    topic = 2 + label[:, None] * 9 + torch.randint(0, 9, (n, LENGTH))
    ids = torch.where(torch.rand(n, LENGTH) < 0.35, topic, ids)
    real = torch.arange(LENGTH) < torch.randint(12, 34, (n, 1))
    ids = torch.where(real, ids, 0)
    ids[:, 0] = 1
    return ids, torch.where(real, torch.tensor(PADDING_IS), torch.tensor(not PADDING_IS)), label


model = Classifier()
if "plain" not in sys.argv:
    ottava.convert(model, "rowwise")
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
losses = []
for step in range(110):
    ids, mask, label = batch()
    loss = nn.functional.cross_entropy(model(ids, mask), label)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    losses.append(loss.item())
print(f"loss {sum(losses[-10:]) / 10:.4f}")
