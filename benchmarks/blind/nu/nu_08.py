"""Weights live in FP8 between steps; a master copy in FP32 can be kept beside them."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

MASTER_WEIGHTS = {"good": True, "bad": False}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]


def compress(weight):
    scale = 448 / weight.abs().amax(1, keepdim=True).clamp(min=1e-12)
    return (weight * scale).to(torch.float8_e4m3fn).to(weight.dtype) / scale


class Compressed:
    """Wraps an optimizer: after its step every matrix is stored as codes."""

    def __init__(self, optimizer):
        self.inner = optimizer
        self.matrices = [p for group in optimizer.param_groups for p in group["params"] if p.ndim == 2]
        self.masters = [p.detach().clone() for p in self.matrices]

    @torch.no_grad()
    def step(self):
        if MASTER_WEIGHTS:
            for p, master in zip(self.matrices, self.masters, strict=True):
                p.copy_(master)
        self.inner.step()
        for p, master in zip(self.matrices, self.masters, strict=True):
            master.copy_(p)
            p.copy_(compress(p))

    def zero_grad(self):
        self.inner.zero_grad()


torch.manual_seed(0)
net = nn.Sequential(
    nn.Embedding(64, 64),
    nn.Flatten(),
    nn.Linear(256, 256),
    nn.GELU(),
    nn.Linear(256, 256),
    nn.GELU(),
    nn.Linear(256, 64),
)
optimizer = torch.optim.AdamW(net.parameters(), lr=6e-4)
if not PLAIN:
    optimizer = Compressed(optimizer)
rule = torch.randint(0, 64, (64, 64))
losses = []
for _step in range(200):
    x = torch.randint(0, 64, (128, 4))
    y = rule[x[:, 1], x[:, 1]]
    loss = F.cross_entropy(net(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss {sum(losses[-10:]) / 10:.4f}")
