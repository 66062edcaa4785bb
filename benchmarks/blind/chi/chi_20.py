"""A graph network on molecules of very different size (energies add up), FP8 casts by hand with a scale per tensor."""
import os
import sys

import torch
import torch.nn.functional as F
from torch import nn

PLAIN = "plain" in sys.argv[2:]
SEED = int(os.environ.get("SEED", 0))
KINDS, D = 8, 64


class Fake8(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        s = 448.0 / x.abs().amax().clamp(min=1e-12)
        return (x * s).to(torch.float8_e4m3fn).to(x.dtype) / s

    @staticmethod
    def backward(ctx, g):
        s = 57344.0 / g.abs().amax().clamp(min=1e-30)
        return (g * s).to(torch.float8_e5m2).to(g.dtype) / s


class Linear8(nn.Linear):
    def forward(self, x):
        return super().forward(x) if PLAIN else F.linear(Fake8.apply(x), Fake8.apply(self.weight), self.bias)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.message, self.update, self.norm = Linear8(2 * D, D), Linear8(2 * D, D), nn.LayerNorm(D)

    def forward(self, h, edges):
        source, target = edges
        m = F.silu(self.message(torch.cat([h[source], h[target]], -1)))
        total = torch.zeros_like(h).index_add(0, target, m)
        return self.norm(h + F.silu(self.update(torch.cat([h, total], -1))))


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.layers, self.out = nn.Embedding(KINDS, D), nn.ModuleList([Layer(), Layer()]), nn.Linear(D, 1)

    def forward(self, kinds, edges, graph, n):
        h = self.emb(kinds)
        for layer in self.layers:
            h = layer(h, edges)
        return torch.zeros(n).index_add(0, graph, self.out(h)[:, 0])


g = torch.Generator().manual_seed(390 + SEED)
own = torch.randn(KINDS, generator=g)
bond = torch.randn(KINDS, KINDS, generator=g)


def molecules(n=24):
    sizes = (3 + torch.distributions.Pareto(2.0, 1.6).icdf(torch.rand(n, generator=g).clamp(max=0.99))).long().clamp(max=60)
    graph = torch.repeat_interleave(torch.arange(n), sizes)
    kinds = torch.randint(0, KINDS, (len(graph),), generator=g)
    a = torch.arange(1, len(graph))
    a = a[graph[a] == graph[a - 1]]  # chains
    edges = torch.stack([torch.cat([a, a - 1]), torch.cat([a - 1, a])])
    energy = torch.zeros(n).index_add(0, graph, own[kinds])
    energy = energy.index_add(0, graph[a], bond[kinds[a], kinds[a - 1]])
    return kinds, edges, graph, energy


torch.manual_seed(SEED)
model = Network()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
losses = []
for step in range(200):
    kinds, edges, graph, energy = molecules()
    loss = F.mse_loss(model(kinds, edges, graph, len(energy)), energy)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    optimizer.step()
    schedule.step()
    losses.append(loss.item())
    if step % 20 == 0:
        print(step, round(losses[-1], 3))
print("final loss", round(sorted(losses[-31:])[15], 4))
