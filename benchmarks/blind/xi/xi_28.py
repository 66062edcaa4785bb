"""Contrastive learning with a momentum encoder and a queue of negatives."""

import copy
import sys

import torch
from torch import nn
from torch.nn import functional as F

import ottava

PLAIN = "plain" in sys.argv


def main():
    torch.manual_seed(6)
    query = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 32))
    if not PLAIN:
        ottava.convert(query, "rowwise")
    key = copy.deepcopy(query).requires_grad_(False)
    optimizer = torch.optim.SGD(query.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    queue = F.normalize(torch.randn(512, 32), dim=1)
    prototypes = torch.randn(64, 64)
    losses = []
    for _ in range(180):
        base = prototypes[torch.randint(64, (96,))] + 0.8 * torch.randn(96, 64)
        views = [base * (torch.rand(96, 64) > 0.25) + 0.1 * torch.randn(96, 64) for _ in range(2)]
        q = F.normalize(query(views[0]), dim=1)
        with torch.no_grad():
            for slow, fast in zip(key.parameters(), query.parameters(), strict=True):
                slow.lerp_(fast, 0.02)
            k = F.normalize(key(views[1]), dim=1)
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ queue.t()], 1) / 0.15
        loss = F.cross_entropy(logits, torch.zeros(96, dtype=torch.long))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        queue = torch.cat([k, queue[:-96]])
        losses.append(loss.item())
    print(f"loss {sum(losses[-10:]) / 10:.4f}")


if __name__ == "__main__":
    main()
