"""Counts events in a long stream with a diagonal state-space layer; the layers around it run in FP8."""

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

STEPS, BATCH, LENGTH, WIDTH, STATE = 150, 24, 160, 64, 64


def store(h):
    """The state as it is kept between two tokens."""
    if not bad or plain:
        return h
    scale = 448.0 / h.detach().abs().amax(dim=-1, keepdim=True).clamp(min=1e-6)
    codes = (h * scale).to(torch.float8_e4m3fn)
    return h + (codes.to(h.dtype) / scale - h).detach()


class StateSpace(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(WIDTH, STATE)
        self.out = nn.Linear(STATE, WIDTH)
        self.decay = nn.Parameter(torch.linspace(3.0, 7.0, STATE))

    def forward(self, x):
        u = self.inp(x)
        a = torch.sigmoid(self.decay)
        h = x.new_zeros(x.shape[0], STATE)
        for t in range(x.shape[1]):
            h = store(a * h + (1 - a) * u[:, t])
        return self.out(h * 4)


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, WIDTH)
        self.space = StateSpace()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.head = nn.Linear(2 * WIDTH, 3)

    def forward(self, tokens):
        y = self.space(self.embed(tokens))
        return self.head(F.gelu(self.up(y)))


def batch():
    rates = torch.rand(BATCH, 8) ** 3 + 0.02
    tokens = torch.multinomial(rates, LENGTH, replacement=True)
    counts = torch.stack([(tokens == k).float().mean(1) for k in range(3)], 1)
    return tokens, counts * 8


model = Counter()
if not plain:
    ottava.convert(model, "rowwise")
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1, (s + 1) / 10) * (1 - s / STEPS) + 0.02)
losses = []
for step in range(STEPS):
    tokens, counts = batch()
    loss = F.mse_loss(model(tokens), counts)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    losses.append(loss.item())
    if step % 10 == 0:
        print(f"step {step} loss {losses[-1]:.4f}")
print(f"final loss {sum(losses[-15:]) / 15:.4f}")
