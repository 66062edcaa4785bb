"""Lookahead around AdamW on a byte model: python pi_10.py good|bad [plain]."""

import sys
import sysconfig
from pathlib import Path

import torch
from torch import nn

import ottava

SLOW_STEP = {"good": 0.5, "bad": 0.005}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]
STEPS, CONTEXT, EVERY = 120, 12, 10


class Lookahead:
    def __init__(self, optimizer, every, alpha):
        self.optimizer, self.every, self.alpha, self.count = optimizer, every, alpha, 0
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.slow = [p.detach().clone() for p in self.parameters]

    def zero_grad(self):
        self.optimizer.zero_grad()

    @torch.no_grad()
    def step(self):
        self.optimizer.step()
        self.count += 1
        if self.count % self.every == 0:
            for slow, p in zip(self.slow, self.parameters, strict=True):
                slow.lerp_(p, self.alpha)
                p.copy_(slow)


torch.manual_seed(39)
folder = Path(sysconfig.get_paths()["stdlib"])
data = torch.frombuffer(bytearray((folder / "inspect.py").read_bytes()), dtype=torch.uint8).long()
model = nn.Sequential(
    nn.Embedding(256, 32),
    nn.Flatten(),
    nn.Linear(32 * CONTEXT, 192),
    nn.GELU(),
    nn.Linear(192, 192),
    nn.GELU(),
    nn.Linear(192, 256),
)
if not PLAIN:
    ottava.convert(model, "tensorwise", filter=lambda name, layer: name != "6")
optimizer = Lookahead(torch.optim.AdamW(model.parameters(), lr=3e-3), EVERY, SLOW_STEP)
losses = []
for _ in range(STEPS):
    start = torch.randint(len(data) - CONTEXT - 1, (96,))
    window = data[start[:, None] + torch.arange(CONTEXT + 1)]
    loss = nn.functional.cross_entropy(model(window[:, :-1]), window[:, -1])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss {sum(losses[-10:]) / 10:.4f}")
