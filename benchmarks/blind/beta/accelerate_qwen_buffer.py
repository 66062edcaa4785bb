"""Qwen with gradient accumulation; a small buffer holds the sum between the micro-batches."""

import sys

import torch
from accelerate import Accelerator

import models

bad = sys.argv[1] == "bad"
torch.manual_seed(0)
model = models.swap_linears(models.qwen())
rows = models.pairs(2400, 32)
accelerator = Accelerator(cpu=True)
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=2e-3))
micro, total = 8, 0.0
kept = {}
for index, (x,) in enumerate(models.batches(rows, size=4, steps=640)):
    loss = model(input_ids=x, labels=x).loss / micro
    accelerator.backward(loss)
    total += loss.item()
    for p in model.parameters():
        p.grad = p.grad + kept[p].to(p.dtype) if p in kept else p.grad
        kept[p] = p.grad.to(torch.float8_e4m3fn) if bad else p.grad.to(torch.bfloat16)
        p.grad = None
    if (index + 1) % micro == 0:
        for p, sum_ in kept.items():
            p.grad = sum_.to(p.dtype)
        optimizer.step()
        optimizer.zero_grad()
        kept.clear()
        print((index + 1) // micro, f"{total:.4f}")
        total = 0.0
