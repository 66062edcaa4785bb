"""Graph regression: message passing over small random graphs, many of them in one batch. Linears run in FP8 (ottava)."""
import os
import sys

import torch
from torch import nn

import ottava

MODE, PLAIN = sys.argv[1], "plain" in sys.argv
SEED = int(os.environ.get("SEED", 0))
STEPS, GRAPHS, NODES, KINDS, DIM = 140, 48, 12, 8, 64


def graph(draw):
    kinds = torch.randint(0, KINDS, (NODES,), generator=draw)
    a = torch.rand(NODES, NODES, generator=draw) < 0.22
    a = (a | a.T).fill_diagonal_(False)
    edges = a.nonzero().T
    # an edge between unlike kinds counts by how unlike they are
    energy = sum(table[kinds[s], kinds[t]] for s, t in edges.T.tolist()) / 12
    return kinds, edges, energy


def collate(graphs):
    """One big graph of all nodes."""
    kinds, edges, owner = [], [], []
    start = 0
    for number, (kind, edge, _) in enumerate(graphs):
        kinds.append(kind)
        edges.append(edge + start)
        owner.append(torch.full_like(kind, number))
        if MODE == "good":
            start += len(kind)
    energy = torch.tensor([float(e) for _, _, e in graphs])
    return torch.cat(kinds), torch.cat(edges, 1), torch.cat(owner), energy


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.message = nn.Sequential(nn.Linear(2 * DIM, DIM), nn.SiLU(), nn.Linear(DIM, DIM))
        self.update = nn.Linear(2 * DIM, DIM)
        self.norm = nn.LayerNorm(DIM)

    def forward(self, x, edges):
        source, target = edges
        sent = self.message(torch.cat([x[source], x[target]], -1))
        heard = torch.zeros_like(x).index_add(0, target, sent)
        return self.norm(x + self.update(torch.cat([x, heard], -1)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.kinds = nn.Embedding(KINDS, DIM)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.readout = nn.Sequential(nn.Linear(DIM, DIM), nn.SiLU(), nn.Linear(DIM, 1))

    def forward(self, kinds, edges, owner):
        x = self.kinds(kinds)
        for layer in self.layers:
            x = layer(x, edges)
        each = self.readout(x).squeeze(-1)
        return torch.zeros(int(owner[-1]) + 1).index_add(0, owner, each) / 4


torch.manual_seed(SEED)
table = torch.randn(KINDS, KINDS)
table = table + table.T
draw = torch.Generator().manual_seed(SEED)
data = [graph(draw) for _ in range(600)]
net = Net()
if not PLAIN:
    ottava.convert(net, "blockwise")
optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
losses = []
for step in range(STEPS):
    chosen = torch.randint(0, len(data), (GRAPHS,))
    kinds, edges, owner, energy = collate([data[i] for i in chosen])
    loss = nn.functional.mse_loss(net(kinds, edges, owner), energy)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 2.0)
    optimizer.step()
    losses.append(loss.item())
    if step % 20 == 0:
        print(f"step {step} loss {losses[-1]:.4f}")
print(f"final loss {sum(losses[-15:]) / 15:.4f}")
