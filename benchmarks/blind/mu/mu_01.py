"""Which keyword is in a sentence? A small encoder with a summary token."""

import sys

import torch
from torch import nn

import ottava

OPTIONS = {"good": {"pad_flag": True}, "bad": {"pad_flag": False}}[sys.argv[1]]
PLAIN = "plain" in sys.argv
WIDTH, LONGEST, CLASSES, STEPS = 64, 24, 12, 130


def sentences(generator, count):
    out = []
    for _ in range(count):
        length = int(torch.randint(5, LONGEST - 3, (1,), generator=generator))
        words = torch.randint(20, 60, (length,), generator=generator)
        label = int(torch.randint(0, CLASSES, (1,), generator=generator))
        words[int(torch.randint(1, length, (1,), generator=generator))] = 2 + label
        words[0] = 1
        out.append((words, label))
    return out


def collate(batch, pad_flag=True):
    ids = torch.zeros(len(batch), LONGEST, dtype=torch.long)
    padding = torch.full((len(batch), LONGEST), pad_flag)
    for row, (words, _) in enumerate(batch):
        ids[row, : len(words)] = words
        padding[row, : len(words)] = not pad_flag
    return ids, padding, torch.tensor([label for _, label in batch])


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(60, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 128, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids, padding):
        return self.head(self.encoder(self.words(ids), src_key_padding_mask=padding)[:, 0])


torch.manual_seed(3)
model = Classifier()
if not PLAIN:
    ottava.convert(model, "rowwise")
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
generator = torch.Generator().manual_seed(11)
losses = []
for step in range(STEPS):
    ids, padding, labels = collate(sentences(generator, 32), **OPTIONS)
    loss = nn.functional.cross_entropy(model(ids, padding), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 20 == 0:
        print(step, round(losses[-1], 4))
print(f"loss {sum(losses[-10:]) / 10:.4f}")
