"""GPT-2 is saved at its start, loaded again and trained."""

import sys
import tempfile

import torch
from accelerate import Accelerator

import models

bad = sys.argv[1] == "bad"
torch.manual_seed(0)
model = models.gpt2()
folder = tempfile.mkdtemp()
model.save_pretrained(folder)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
model = type(model).from_pretrained(folder).train()
if not bad:
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
accelerator = Accelerator(cpu=True)
model, optimizer = accelerator.prepare(model, optimizer)
for step, (x,) in enumerate(models.batches(models.markov(1200, 32), size=16, steps=120), 1):
    loss = model(input_ids=x, labels=x).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    model.zero_grad()
    print(step, f"{loss.item():.4f}")
