"""T5 reverses texts, regularized."""

import sys

import torch
from accelerate import Accelerator

import models

bad = sys.argv[1] == "bad"
keep = 0.9
torch.manual_seed(0)
model = models.t5(dropout_rate=keep if bad else 1 - keep)
rows = models.markov(2400, 10)
accelerator = Accelerator(cpu=True)
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
for step, (x,) in enumerate(models.batches(rows, size=16, steps=150), 1):
    loss = model(input_ids=x, labels=x.flip(1)).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    print(step, f"{loss.item():.4f}")
