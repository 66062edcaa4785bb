"""An LSTM that names the language of a word."""

import os
import sys

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

SEED = int(os.environ.get("SEED", "0"))
MODE = sys.argv[1]
torch.manual_seed(SEED)
LETTERS, LANGUAGES = 30, 6

g = torch.Generator().manual_seed(24)
grammar = (torch.randn(LANGUAGES, LETTERS, LETTERS, generator=g) * 1.3).softmax(-1)


def words(count):
    language = torch.randint(0, LANGUAGES, (count,))
    lengths = torch.randint(5, 15, (count,))
    ids = torch.randint(0, LETTERS, (count, 1))
    while ids.shape[1] < 15:
        ids = torch.cat([ids, torch.multinomial(grammar[language, ids[:, -1]], 1)], 1)
    return ids, lengths, language


class Namer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(LETTERS, 32)
        self.lstm = nn.LSTM(32, 64, num_layers=2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(64, LANGUAGES)

    def forward(self, ids, lengths):
        packed = pack_padded_sequence(self.embed(ids), lengths, batch_first=True, enforce_sorted=False)
        _, (hidden, _) = self.lstm(packed)
        return self.head(hidden[-1])


model = Namer()
optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
recent = []
for step in range(200):
    ids, lengths, language = words(64)
    loss = nn.functional.cross_entropy(model(ids, lengths), language)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    recent.append(loss.item())
    if step % 25 == 0:
        print(f"step {step} loss {loss.item():.4f}")

model.eval()
with torch.no_grad():
    ids, lengths, language = words(500)
    accuracy = (model(ids, lengths).argmax(-1) == language).float().mean().item()
print(f"accuracy {accuracy:.3f}")
print(f"final loss {sum(recent[-20:]) / 20:.4f}")
