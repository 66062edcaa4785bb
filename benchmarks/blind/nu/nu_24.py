"""Training with a moving average of the weights that is used for a validation pass now and then."""

import copy
import sys

import torch
import torch.nn.functional as F
from torch import nn

import ottava

RESTORE_AFTER_EVAL = {"good": True, "bad": False}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]


class Ema:
    def __init__(self, model, decay):
        self.model, self.decay = model, decay
        self.shadow = [p.detach().clone() for p in model.parameters()]

    @torch.no_grad()
    def update(self):
        for s, p in zip(self.shadow, self.model.parameters(), strict=True):
            s.lerp_(p, 1 - self.decay)

    @torch.no_grad()
    def copy_to(self):
        for s, p in zip(self.shadow, self.model.parameters(), strict=True):
            p.copy_(s)

    def store(self):
        self.kept = copy.deepcopy(self.model.state_dict())

    def restore(self):
        self.model.load_state_dict(self.kept)


def batch(n):
    x = torch.randint(0, 64, (n, 4))
    return x, rule[x[:, 2]]


torch.manual_seed(0)
rule = torch.randint(0, 64, (64,))
model = nn.Sequential(
    nn.Embedding(64, 32),
    nn.Flatten(),
    nn.Linear(128, 256),
    nn.GELU(),
    nn.Linear(256, 256),
    nn.GELU(),
    nn.Linear(256, 64),
)
if not PLAIN:
    ottava.convert(model, "blockwise")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
ema = Ema(model, 0.995)
losses = []
for step in range(160):
    x, y = batch(128)
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    ema.update()
    losses.append(loss.item())
    if step % 20 == 19:
        ema.store()
        ema.copy_to()
        with torch.no_grad():
            x, y = batch(256)
            validation = F.cross_entropy(model(x), y).item()
        if RESTORE_AFTER_EVAL:
            ema.restore()
print(f"loss {sum(losses[-10:]) / 10:.4f}")
