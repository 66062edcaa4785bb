"""A BF16 decoder under delayed scaling with its defaults: warm-up, cosine, accumulation of two micro-batches."""

import sys

import torch
import torch.nn.functional as F

import ottava
from models import TinyLM, markov

assert sys.argv[1] == "good"
torch.manual_seed(21)
model = TinyLM(width=64)
ottava.convert(model, "delayed")
opt = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
warm = torch.optim.lr_scheduler.LinearLR(opt, 0.1, 1.0, 10)
cosine = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 60, 3e-4)
schedule = torch.optim.lr_scheduler.SequentialLR(opt, [warm, cosine], [10])
for step in range(70):
    total = 0.0
    for _ in range(2):
        ids = markov(8, 33)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten()) / 2
        loss.backward()
        total += loss.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    opt.zero_grad()
    schedule.step()
    if step % 10 == 9:
        print(f"step {step} loss {total:.4f}", flush=True)
