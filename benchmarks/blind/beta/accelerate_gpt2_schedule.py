"""GPT-2 in FP8 through accelerate, with warm-up and gradient accumulation."""

import sys

import torch
import transformers as hf
from accelerate import Accelerator
from ottava.doors.accelerate import prepare
from torch.utils.data import DataLoader

import models

bad = sys.argv[1] == "bad"
torch.manual_seed(0)
model = models.gpt2()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
loader = DataLoader(models.pairs(2400, 32), batch_size=8, shuffle=True)
micro, epochs = 2, 1
steps = epochs * len(loader) // micro
if bad:
    steps = epochs * len(loader) // loader.batch_size // micro
schedule = hf.get_linear_schedule_with_warmup(optimizer, 5, steps)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=micro)
model, optimizer, loader, schedule = prepare(accelerator, model, optimizer, loader, schedule, recipe="blockwise")
total = 0.0
for index, x in enumerate(loader, 1):
    with accelerator.accumulate(model):
        loss = model(input_ids=x, labels=x).loss
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    total += loss.item() / micro
    if index % micro == 0:
        print(index // micro, f"{total:.4f}")
        total = 0.0
