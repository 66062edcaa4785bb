"""DeepCluster: k-means names the rows, a new head learns the names, k-means names them again.

    python yod_05.py good

Rows are calls of twelve species over loud backgrounds; the names of species are used for the score alone. Another background
is added to each row as augmentation.
"""

import os

import torch
import torch.nn.functional as F
from torch import nn

import ottava

SEED = int(os.environ.get("SEED", "0"))
SPECIES, CLUSTERS, DIM, ROUNDS, STEPS = 12, 36, 64, 6, 35


class World:
    def __init__(self, generator):
        self.generator = generator
        basis = torch.linalg.qr(torch.randn(DIM, DIM, generator=generator))[0]
        self.calls = torch.randn(SPECIES, 20, generator=generator) @ basis[:20]
        self.noises = basis[20:50]

    def background(self, count):
        return 2.0 * torch.randn(count, 30, generator=self.generator) @ self.noises

    def rows(self, count):
        kind = torch.randint(SPECIES, (count,), generator=self.generator)
        own = 0.25 * torch.randn(count, DIM, generator=self.generator)
        return self.calls[kind] + own + self.background(count), kind


def features(trunk, rows):
    trunk.eval()
    with torch.no_grad():
        values = F.normalize(trunk(rows), dim=1)
    trunk.train()
    return values


def kmeans(points, count, turns=12):
    centres = points[torch.randperm(len(points))[:count]].clone()
    for _ in range(turns):
        names = torch.cdist(points, centres).argmin(1)
        for c in range(count):
            mine = points[names == c]
            centres[c] = mine.mean(0) if len(mine) else points[torch.randint(len(points), (1,))[0]]
    return torch.cdist(points, centres).argmin(1)


def wrong_neighbours(trunk, held, kind):
    points = features(trunk, held)
    away = torch.cdist(points, points)
    away.fill_diagonal_(9.0)
    return (kind[away.argmin(1)] != kind).float().mean().item()


def main():
    torch.manual_seed(SEED)
    world = World(torch.Generator().manual_seed(900 + SEED))
    rows, _ = world.rows(3000)
    held, kind = world.rows(900)
    trunk = nn.Sequential(
        nn.Linear(DIM, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 64)
    )
    ottava.convert(trunk, "delayed")
    print(f"first loss {wrong_neighbours(trunk, held, kind):.4f}")
    for turn in range(ROUNDS):
        names = kmeans(features(trunk, rows), CLUSTERS)
        head = nn.Linear(64, CLUSTERS)  # the names of the last round mean nothing any more
        optimizer = torch.optim.SGD(
            [*trunk.parameters(), *head.parameters()], lr=0.2, momentum=0.9, nesterov=True, weight_decay=1e-4
        )
        sizes = torch.bincount(names, minlength=CLUSTERS).float()
        share = (1.0 / sizes.clamp(min=1))[names]
        for step in range(STEPS):
            chosen = torch.multinomial(share, 256)  # each cluster as often as any other
            x = rows[chosen] + world.background(256)
            loss = F.cross_entropy(head(trunk(x)), names[chosen])
            optimizer.zero_grad(set_to_none=False)
            loss.backward()
            optimizer.step()
            if step in (0, STEPS - 1):
                print(f"round {turn} step {step} loss {loss.item():.4f}")
        print(f"round {turn} wrong neighbours {wrong_neighbours(trunk, held, kind):.4f}")
    print(f"final loss {wrong_neighbours(trunk, held, kind):.4f}")


main()
