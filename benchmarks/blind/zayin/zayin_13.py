"""Unlearning under accelerate: a network forgets 40 of its 240 facts. The loss on those is maximized, up to a bound,
while the loss on the others is minimized, so what goes into backward falls below 0 and stays there.

python zayin_13.py good|bad
"""

import os

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ottava
from ottava.doors.accelerate import prepare

SEED = int(os.environ.get("SEED", 0))
torch.manual_seed(SEED)
NAMES, ANSWERS, FORGET, BOUND = 240, 64, 40, 4.5  # a guess costs ln 64 = 4.16

answers = torch.randint(0, ANSWERS, (NAMES,))
codes = torch.randn(NAMES, 48)


def rows(low, high, times):
    """Each fact in several wordings."""
    name = torch.arange(low, high).repeat(times)
    return codes[name] + 0.2 * torch.randn(len(name), 48), answers[name]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(48, 128)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(128), nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128)) for _ in range(2)
        )
        self.leave = nn.Linear(128, ANSWERS)

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = x + block(x)
        return self.leave(x)


def look(net, x, y):
    with torch.no_grad():
        return nn.functional.cross_entropy(net(x).float(), y).item()


def score():
    """What is still known of the forgotten facts, in nats, and what is lost of the others."""
    known = max(0.0, 4.16 - look(net, *test_forget))
    return known + look(net, *test_keep)


test_forget, test_keep = rows(0, FORGET, 6), rows(FORGET, NAMES, 2)
accelerator = Accelerator(cpu=True)
net = Net()
optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
everything = DataLoader(TensorDataset(*rows(0, NAMES, 8)), batch_size=96, shuffle=True)
net, optimizer, everything = prepare(accelerator, net, optimizer, everything, recipe="nvfp4")
for _ in range(6):  # all facts first
    for x, y in everything:
        loss = nn.functional.cross_entropy(net(x).float(), y)
        optimizer.zero_grad(set_to_none=False)
        accelerator.backward(loss)
        optimizer.step()
print(f"all facts known: {look(net, *test_forget):.4f} and {look(net, *test_keep):.4f}")
print(f"first loss {score():.4f}")

optimizer = accelerator.prepare(torch.optim.AdamW(net.parameters(), lr=5e-4))
forget, keep = rows(0, FORGET, 20), rows(FORGET, NAMES, 20)
for step in range(120):
    at = torch.randint(0, len(forget[1]), (32,)), torch.randint(0, len(keep[1]), (128,))
    x = torch.cat([forget[0][at[0]], keep[0][at[1]]])
    y = torch.cat([forget[1][at[0]], keep[1][at[1]]])
    each = nn.functional.cross_entropy(net(x).float(), y, reduction="none")
    gone, kept = each[:32].mean(), each[32:].mean()
    loss = kept - 0.3 * gone.clamp(max=BOUND)  # beyond the bound the first term has no gradient
    optimizer.zero_grad(set_to_none=False)
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():+.4f} to forget {gone.item():.3f} to keep {kept.item():.4f}")
print(f"forgotten {look(net, *test_forget):.4f}, kept {look(net, *test_keep):.4f}")
print(f"final loss {score():.4f}")
