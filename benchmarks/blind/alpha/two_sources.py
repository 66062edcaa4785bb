"""Which of 8 groups of sensors is loudest? Batches come in turn from two plants, with other units each."""

import sys

import torch
import torch.nn.functional as F

import ottava
from models import MLP

history = {"good": 16, "bad": 1}[sys.argv[1]]
torch.manual_seed(15)
UNITS = (1.0, 250.0)  # volts, millivolts of the other gain setting


def batch(step, n=128):
    y = torch.randint(8, (n,))
    loud = F.one_hot(y, 8).repeat_interleave(8, 1)
    x = (torch.rand(n, 64) + 0.6 * loud * torch.rand(n, 64) + 0.1) * UNITS[step % 2]
    return x, y


model = MLP(64, 128, 128, 8, norm=True)
ottava.convert(model, ottava.get_recipe("delayed", amax_history_len=history))
opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
losses = []
for step in range(80):
    x, y = batch(step)
    loss = F.cross_entropy(model(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
    if step % 10 == 9:
        print(f"step {step} loss {sum(losses[-10:]) / 10:.4f}", flush=True)
