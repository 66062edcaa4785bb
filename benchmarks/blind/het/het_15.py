"""Node classification with graph attention on a stochastic block graph."""
import os
import sys

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import ottava

mode = sys.argv[1]
plain = "plain" in sys.argv[2:]
seed = int(os.environ.get("SEED", 0))
torch.manual_seed(seed)

NODES, CLASSES, FEATURES, STEPS = 600, 6, 64, 120
labels = torch.randint(0, CLASSES, (NODES,))
same = labels[:, None] == labels[None]
adjacency = torch.rand(NODES, NODES) < torch.where(same, 0.10, 0.004)
adjacency.fill_diagonal_(False)
source, target = adjacency.nonzero(as_tuple=True)
means = torch.randn(CLASSES, FEATURES) * 0.25
train = torch.rand(NODES) < 0.5


def softmax_by_target(scores, target):
    if mode == "bad":
        return torch.softmax(scores, dim=0)
    top = torch.full((NODES, scores.shape[1]), -1e30).scatter_reduce(
        0, target[:, None].expand_as(scores), scores.detach(), "amax"
    )
    exp = (scores - top[target]).exp()
    total = torch.zeros(NODES, scores.shape[1]).index_add(0, target, exp)
    return exp / total[target].clamp(min=1e-9)


class Attention(nn.Module):
    def __init__(self, n_in, heads, dim):
        super().__init__()
        self.heads, self.dim = heads, dim
        self.project = nn.Linear(n_in, heads * dim, bias=False)
        self.left = nn.Parameter(torch.randn(heads, dim) * 0.2)
        self.right = nn.Parameter(torch.randn(heads, dim) * 0.2)

    def forward(self, x):
        h = self.project(x).view(-1, self.heads, self.dim)
        scores = F.leaky_relu((h * self.left).sum(-1)[source] + (h * self.right).sum(-1)[target], 0.2)
        weight = softmax_by_target(scores, target)
        return torch.zeros_like(h).index_add(0, target, h[source] * weight[..., None]).flatten(1)


class GAT(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = Attention(FEATURES, 4, 16)
        self.two = Attention(64, 4, 16)
        self.head = nn.Linear(64, CLASSES)

    def forward(self, x):
        return self.head(F.elu(self.two(F.elu(self.one(x)))))


model = GAT()
if not plain:
    ottava.convert(model, "mxfp8")
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, weight_decay=5e-4)
losses = []
for step in range(STEPS):
    x = means[labels] + torch.randn(NODES, FEATURES)
    out = model(x)
    loss = F.cross_entropy(out[train], labels[train])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    held = F.cross_entropy(out[~train], labels[~train]).item()
    losses.append(held)
    if step % 20 == 0:
        print(f"step {step} loss {loss.item():.4f} held-out {held:.4f}")
print(f"final loss {np.mean(losses[-10:]):.4f}")
