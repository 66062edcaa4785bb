"""Max-cut by a graph network without any labels: the loss is minus the expected share of edges that are cut, so it
begins at -0.5.

Each step has other graphs, of 20 to 60 nodes. Nodes have no features but random ones, drawn anew each time, to break
ties. The clip to 0.1 acts in most steps, and the mean of the weights (EMA) is what is used.
"""

import copy
import os

import torch
from torch import nn

SEED = int(os.environ.get("SEED", "0"))
WIDTH, ROUNDS, STEPS, GRAPHS = 48, 6, 200, 8


def graphs(number, generator):
    """A batch as one graph with several parts: edges in both directions. Most edges of a graph join its two hidden halves."""
    edges, nodes = [], 0
    for _ in range(number):
        size = int(torch.randint(20, 61, (1,), generator=generator))
        half = torch.rand(size, generator=generator) < 0.5
        a = torch.randint(0, size, (6 * size,), generator=generator)
        b = torch.randint(0, size, (6 * size,), generator=generator)
        wanted = (half[a] != half[b]) | (torch.rand(6 * size, generator=generator) < 0.1)
        keep = wanted & (a != b)
        edges.append(torch.stack([a[keep], b[keep]]) + nodes)
        nodes += size
    edges = torch.cat(edges, 1)
    return torch.cat([edges, edges.flip(0)], 1), nodes


class Net(nn.Module):
    """Messages are means over neighbours; the same layer in all rounds."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(8, WIDTH)
        self.own, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, edges, nodes, noise):
        h = self.enter(noise)
        degree = torch.zeros(nodes).index_add_(0, edges[1], torch.ones(edges.shape[1])).clamp(min=1)
        for _ in range(ROUNDS):
            heard = torch.zeros_like(h).index_add_(0, edges[1], h[edges[0]]) / degree[:, None]
            h = h + torch.tanh(self.norm(self.own(h) - self.other(heard)))
        return self.last(h).squeeze(1).sigmoid()


def uncut(model, edges, nodes, noise):
    """Minus the expected share of cut edges."""
    p = model(edges, nodes, noise)
    a, b = p[edges[0]], p[edges[1]]
    return -(a * (1 - b) + b * (1 - a)).mean()


@torch.no_grad()
def evaluate(model, held):
    """Minus the share of edges that are cut when each node takes its likelier side."""
    edges, nodes = held
    noise = torch.randn(nodes, 8, generator=torch.Generator().manual_seed(1))
    side = model(edges, nodes, noise) > 0.5
    return -(side[edges[0]] != side[edges[1]]).float().mean().item()


def main():
    torch.manual_seed(SEED)
    generator = torch.Generator().manual_seed(29 + SEED)
    held = graphs(60, torch.Generator().manual_seed(1234 + SEED))
    model = Net()
    mean = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    print("first loss", round(evaluate(mean, held), 4))
    for step in range(STEPS):
        edges, nodes = graphs(GRAPHS, generator)
        loss = uncut(model, edges, nodes, torch.randn(nodes, 8))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(mean.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast, 1 - min(0.95, (1 + step) / (10 + step)))
        if step % 20 == 0:
            print(step, round(loss.item(), 4), "mean weights", round(evaluate(mean, held), 4))
    print("final loss", round(evaluate(mean, held), 4))


if __name__ == "__main__":
    main()
