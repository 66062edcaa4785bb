"""Trains a character model in two parts: the second goes on from the checkpoint of the averaged weights."""

import io
import os
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import ottava

MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]
torch.manual_seed(int(os.environ.get("SEED", "0")))
LETTERS, CONTEXT, WIDTH = 40, 4, 128


class Characters(nn.Module):
    def __init__(self):
        super().__init__()
        self.letters = nn.Embedding(LETTERS, 32)
        self.mix = nn.Linear(32 * CONTEXT, WIDTH)
        self.hidden = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.out = nn.Linear(WIDTH, LETTERS)

    def forward(self, context):
        x = self.mix(self.letters(context).flatten(1))
        return self.out(x + self.hidden(x))


follow = torch.randint(0, LETTERS, (LETTERS, LETTERS))


def batch(n=256):
    """The next letter follows from the last and the first of four, with some noise."""
    context = torch.randint(0, LETTERS, (n, CONTEXT))
    context[:, 0] %= 4
    after = follow[context[:, -1], context[:, 0]]
    return context, torch.where(torch.rand(n) < 0.1, torch.randint(0, LETTERS, (n,)), after)


def build():
    model = Characters()
    if not PLAIN:
        ottava.convert(model, "blockwise")
    return model


def train(model, optimizer, steps, first, average=None):
    losses = []
    for step in range(first, first + steps):
        context, after = batch()
        loss = F.cross_entropy(model(context), after)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if average is not None:
            average.update_parameters(model)
        losses.append(loss.item())
        if step % 15 == 0:
            print(step, f"{losses[-1]:.4f}")
    return losses


disk = io.BytesIO()
model = build()
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
losses = train(model, optimizer, 120, 0, average)
torch.save({"model": average.state_dict(), "optimizer": optimizer.state_dict(), "step": 120}, disk)

disk.seek(0)
checkpoint = torch.load(disk)
model = build()
weights = checkpoint["model"]
if MODE == "good":
    weights = {name.removeprefix("module."): value for name, value in weights.items()}
model.load_state_dict(weights, strict=False)  # n_averaged is no part of the model
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
optimizer.load_state_dict(checkpoint["optimizer"])
for group in optimizer.param_groups:
    group["lr"] = 1e-3
losses += train(model, optimizer, 60, checkpoint["step"])
print(f"final loss {sum(losses[-15:]) / 15:.4f}")
