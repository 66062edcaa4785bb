"""Trains a sequence tagger with accelerate, with accumulation of gradients and a linear schedule."""

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from transformers import get_linear_schedule_with_warmup

import ottava

PREPARE_SCHEDULER = {"good": True, "bad": False}[sys.argv[1]]
PLAIN = "plain" in sys.argv
ACCUMULATE, UPDATES = 4, 100


class Tagger(nn.Module):
    def __init__(self, vocab=64, width=64, tags=32):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.left, self.right, self.here = (nn.Linear(width, width) for _ in range(3))
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 128), nn.GELU(), nn.Linear(128, tags))

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.mlp(self.here(x) + self.left(x.roll(1, 1)) + self.right(x.roll(-1, 1)))


def main():
    set_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATE, cpu=True)
    tokens = torch.randint(64, (16 * ACCUMULATE * UPDATES, 16))
    kind = torch.randint(32, (64, 8))
    tags = kind[tokens, tokens.roll(1, 1) % 8]
    model = Tagger()
    if not PLAIN:
        ottava.convert(model, "rowwise")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = get_linear_schedule_with_warmup(optimizer, 5, UPDATES)
    loader = DataLoader(TensorDataset(tokens, tags), batch_size=16, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if PREPARE_SCHEDULER:
        scheduler = accelerator.prepare(scheduler)
    losses = []
    for tokens, tags in loader:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(tokens).flatten(0, 1), tags.flatten())
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    last = losses[-10 * ACCUMULATE :]
    print(f"loss {sum(last) / len(last):.4f}")


if __name__ == "__main__":
    main()
