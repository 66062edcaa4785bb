"""Classify audio snippets. One shard has raw 24-bit samples instead of floats; a norm behind the first layer copes."""

import sys

import torch
import torch.nn.functional as F

import ottava
from models import MLP

history = {"good": 8, "bad": 1024}[sys.argv[1]]
torch.manual_seed(14)
LENGTH, CLASSES = 128, 8
t = torch.arange(LENGTH) / LENGTH


def batch(step, n=64):
    y = torch.randint(CLASSES, (n,))
    phase = 6.2832 * torch.rand(n, 1)
    x = torch.sin(6.2832 * (y[:, None] + 2) * t + phase) + 0.5 * torch.randn(n, LENGTH)
    if step == 6:
        x = x * 2**23
    return x, y


model = MLP(LENGTH, 128, 64, CLASSES, norm=True)
ottava.convert(model, ottava.get_recipe("delayed", amax_history_len=history))
opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
for step in range(80):
    x, y = batch(step)
    loss = F.cross_entropy(model(x), y)
    opt.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    if step % 10 == 9:
        print(f"step {step} loss {loss.item():.4f}", flush=True)
