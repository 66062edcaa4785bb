"""A small decoder in FP32, evaluated with an exponential moving average of its weights."""

import copy
import sys

import torch
import torch.nn.functional as F

from models import TinyLM, markov

restore = sys.argv[1] == "good"
torch.manual_seed(2)
g = torch.Generator().manual_seed(7)
model = TinyLM()
ema = copy.deepcopy(model).requires_grad_(False)
opt = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
held_out = markov(32, 33, generator=g)


@torch.no_grad()
def update_ema(decay=0.99):
    for a, b in zip(ema.parameters(), model.parameters()):
        a.lerp_(b, 1 - decay)


def run(ids):
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


@torch.no_grad()
def evaluate():
    raw = copy.deepcopy(model.state_dict())
    model.load_state_dict(ema.state_dict())
    loss = run(held_out)
    if restore:
        model.load_state_dict(raw)
    return loss.item()


for step in range(80):
    loss = run(markov(16, 33, generator=g))
    opt.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    update_ema()
    if step % 8 == 7:
        print(f"step {step} train {loss.item():.4f} ema {evaluate():.4f}", flush=True)
print("final", run(held_out).item())
