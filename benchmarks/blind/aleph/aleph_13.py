"""A character LSTM whose state is carried from batch to batch, 2 micro-batches a step, a clip of 0.1 that always acts, and a one-cycle rate."""
import os

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.nn import functional as F

SEED = int(os.environ.get("SEED", 0))
set_seed(SEED)
STREAMS, LENGTH, STEPS, MICRO = 16, 32, 120, 2
WORDS = "the a small old red big dog cat bird house sees finds likes runs to from near with and then never often".split()
ALPHABET = sorted(set(" ." + "".join(WORDS)))
CODE = {c: i for i, c in enumerate(ALPHABET)}


def stream(size, generator):
    """Words in an order of their own: each is followed by one of three."""
    after = torch.randint(0, len(WORDS), (len(WORDS), 3), generator=torch.Generator().manual_seed(11))
    word, text = int(torch.randint(0, len(WORDS), (), generator=generator)), []
    while sum(map(len, text)) + len(text) < size:
        text.append(WORDS[word])
        word = int(after[word, int(torch.randint(0, 3, (), generator=generator))])
    return torch.tensor([CODE[c] for c in " ".join(text)[:size].ljust(size, ".")])


class Writer(nn.Module):
    def __init__(self, width=128):
        super().__init__()
        self.embed = nn.Embedding(len(ALPHABET), 32)
        self.rnn = nn.LSTM(32, width, batch_first=True)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(width, len(ALPHABET))
        with torch.no_grad():  # the forget gate begins open
            self.rnn.bias_ih_l0[width : 2 * width].fill_(1.0)

    def forward(self, tokens, state=None):
        h, state = self.rnn(self.embed(tokens), state)
        return self.head(self.drop(h)), state


generator = torch.Generator().manual_seed(SEED + 5)
size = STEPS * MICRO * LENGTH + 1
text = torch.stack([stream(size, generator) for _ in range(STREAMS)])
held = torch.stack([stream(513, generator) for _ in range(STREAMS)])
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=MICRO, step_scheduler_with_optimizer=False)
model = Writer()
optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=8e-3, total_steps=STEPS, pct_start=0.25)
model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)


def validate():
    model.eval()
    with torch.no_grad():
        out, _ = model(held[:, :-1])
    model.train()
    return F.cross_entropy(out.flatten(0, 1), held[:, 1:].flatten()).item()


print(f"first loss {validate():.4f}")
state = None
for micro in range(STEPS * MICRO):
    piece = text[:, micro * LENGTH : (micro + 1) * LENGTH + 1]
    with accelerator.accumulate(model):
        out, state = model(piece[:, :-1], state)
        state = tuple(s.detach() for s in state)  # truncated backpropagation
        loss = F.cross_entropy(out.flatten(0, 1), piece[:, 1:].flatten())
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            norm = accelerator.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        if accelerator.sync_gradients:
            scheduler.step()
        optimizer.zero_grad()
    if micro % 30 == 29:
        accelerator.print(f"step {micro // MICRO} loss {loss.item():.4f} norm before the clip {float(norm):.2f}")

print(f"final loss {validate():.4f}")
