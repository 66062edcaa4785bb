"""A tagger trained with accelerate: gradient accumulation, linear decay after a warmup."""

import sys

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from transformers import get_linear_schedule_with_warmup

import ottava

PREPARE_SCHEDULER = {"good": True, "bad": False}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]
ACCUMULATE, UPDATES = 3, 60


class Tagger(nn.Module):
    def __init__(self, vocab=80, tags=12, dim=64):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.mix = nn.Conv1d(dim, dim, 3, padding=1)
        self.mlp = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 256), nn.GELU(), nn.Linear(256, dim))
        self.head = nn.Linear(dim, tags)

    def forward(self, ids):
        x = self.mix(self.embed(ids).transpose(1, 2)).transpose(1, 2)
        return self.head(x + self.mlp(x))


torch.manual_seed(6)
words = torch.randint(80, (3000, 20))
tags = (torch.randint(12, (80,))[words] + torch.randint(12, (80,))[words.roll(1, 1)]) % 12
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(words, tags), batch_size=16, shuffle=True)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
model = Tagger()
if not PLAIN:
    ottava.convert(model, "rowwise")
optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3)
scheduler = get_linear_schedule_with_warmup(optimizer, 5, UPDATES)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
if PREPARE_SCHEDULER:
    scheduler = accelerator.prepare(scheduler)
losses = []
for ids, target in loader:
    with accelerator.accumulate(model):
        loss = F.cross_entropy(model(ids).flatten(0, 1).float(), target.flatten())
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    losses.append(loss.item())
    if len(losses) == ACCUMULATE * UPDATES:
        break
print(f"loss {sum(losses[-10:]) / 10:.4f}")
