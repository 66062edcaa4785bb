"""Reptile: each outer step trains a copy on a new small task, with a new optimizer, and moves the weights a part of
the way to where the copy ended. The loss is a saw: high at the start of a task, low at its end.

python zayin_30.py good|bad
"""

import copy
import os

import torch
from torch import nn

import ottava

SEED = int(os.environ.get("SEED", 0))
torch.manual_seed(SEED)
WIDTH, WAYS, SHOTS, INNER, OUTER = 64, 4, 8, 5, 60

world = nn.Sequential(nn.Linear(12, 64), nn.Tanh(), nn.Linear(64, WIDTH))
for p in world.parameters():
    p.data.mul_(1.8)
kinds = torch.randn(120, 12)  # the last 30 are never seen in training


def task(low, high, queries=16):
    """Four kinds under labels that mean nothing beyond this task."""
    picked = low + torch.randperm(high - low)[:WAYS]
    labels = torch.arange(WAYS).repeat_interleave(SHOTS + queries)
    with torch.no_grad():
        x = world(kinds[picked][labels] + 0.35 * torch.randn(len(labels), 12))
    support = (torch.arange(len(labels)) % (SHOTS + queries)) < SHOTS
    return x[support], labels[support], x[~support], labels[~support]


net = nn.Sequential(nn.Linear(WIDTH, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, WAYS))
ottava.convert(net, "blockwise")


def learn(model, x, y, steps=INNER):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.15)
    losses = []
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def held_out(count=20):
    """New kinds: the loss on queries after the same five steps."""
    state, found = torch.get_rng_state(), []
    torch.manual_seed(11)
    for _ in range(count):
        x, y, query, wanted = task(90, 120)
        fast = copy.deepcopy(net)
        learn(fast, x, y)
        with torch.no_grad():
            found.append(nn.functional.cross_entropy(fast(query), wanted).item())
    torch.set_rng_state(state)
    return sum(found) / len(found)


print(f"first loss {held_out():.4f}")
for outer in range(OUTER):
    share = 0.6 * (1 - outer / OUTER)
    before = [p.detach().clone() for p in net.parameters()]
    x, y, query, wanted = task(0, 90)
    losses = learn(net, torch.cat([x, query]), torch.cat([y, wanted]))
    with torch.no_grad():
        for p, old in zip(net.parameters(), before):
            p.copy_(old + share * (p - old))
    if outer % 10 == 0:
        print(f"task {outer} loss {losses[0]:.4f} to {losses[-1]:.4f}")
print(f"final loss {held_out():.4f}")
