"""Speech-like frames to letters with CTC: a convolution, a GRU and linear layers of ottava."""

import os
import sys

import torch
from torch import nn
from torch.nn import functional as F

import ottava

bad = sys.argv[1] == "bad"
plain = "plain" in sys.argv
torch.manual_seed(int(os.environ.get("SEED", 0)))
torch.set_num_threads(1)

STEPS, BATCH, LETTERS, BANDS, MOST = 120, 24, 12, 20, 7
BLANK = 0 if bad else LETTERS


class Listener(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(BANDS, 64, 5, stride=2, padding=2)
        self.mix = nn.Linear(64, 64)
        self.rnn = nn.GRU(64, 48, batch_first=True, bidirectional=True)
        self.up = nn.Linear(96, 96)
        self.head = nn.Linear(96, LETTERS + 1)

    def forward(self, frames):
        h = F.relu(self.conv(frames.transpose(1, 2))).transpose(1, 2)
        h, _ = self.rnn(F.gelu(self.mix(h)))
        return torch.log_softmax(self.head(F.gelu(self.up(h))), -1)


sounds = torch.randn(LETTERS, BANDS, generator=torch.Generator().manual_seed(4))


def utterances():
    frames, letters, lengths, counts = [], [], [], []
    for _ in range(BATCH):
        n = int(torch.randint(3, MOST + 1, ()))
        word = torch.randint(0, LETTERS, (n,))
        hold = torch.randint(5, 9, (n,))
        x = sounds[word.repeat_interleave(hold)]
        frames.append(x + 0.4 * torch.randn_like(x))
        letters.append(word)
        lengths.append((len(x) + 1) // 2)
        counts.append(n)
    return nn.utils.rnn.pad_sequence(frames, True), torch.cat(letters), torch.tensor(lengths), torch.tensor(counts)


def errors(logp, letters, lengths, counts):
    """Share of utterances that the greedy decoder gets wrong."""
    wrong = 0
    for row, n, word in zip(logp.argmax(-1), lengths, letters.split(counts.tolist())):
        best = torch.unique_consecutive(row[:n])
        best = best[best != BLANK]
        wrong += not torch.equal(best, word)
    return wrong / len(counts)


model = Listener()
if not plain:
    ottava.convert(model, "blockwise")
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
losses, wrong = [], []
for step in range(STEPS):
    frames, letters, lengths, counts = utterances()
    logp = model(frames)
    loss = F.ctc_loss(logp.transpose(0, 1), letters, lengths, counts, blank=BLANK, zero_infinity=True)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 2.0)
    optimizer.step()
    losses.append(loss.item())
    wrong.append(errors(logp.detach(), letters, lengths, counts))
    if step % 10 == 0:
        print(f"step {step} loss {losses[-1]:.4f} wrong {wrong[-1]:.2f}")
print(f"final loss {sum(wrong[-15:]) / 15:.4f}")
