"""A graph attention network that finds which neighbour each node listens to; casts by hand in its linears."""

import os
import sys

import torch
from torch import nn
from torch.nn import functional as F

bad = sys.argv[1] == "bad"
plain = "plain" in sys.argv
torch.manual_seed(int(os.environ.get("SEED", 0)))
torch.set_num_threads(1)

STEPS, NODES, DEGREE, FEATURES, WIDTH, CLASSES = 150, 400, 6, 24, 64, 8


class Cast(torch.autograd.Function):
    """E4M3 forward, E5M2 backward, one current scale for each row."""

    @staticmethod
    def forward(ctx, x):
        s = 448.0 / x.abs().amax(-1, keepdim=True).clamp(min=1e-12)
        return (x * s).to(torch.float8_e4m3fn).float() / s

    @staticmethod
    def backward(ctx, g):
        s = 57344.0 / g.abs().amax(-1, keepdim=True).clamp(min=1e-20)
        return (g * s).to(torch.float8_e5m2).float() / s


class Linear8(nn.Linear):
    def forward(self, x):
        if plain:
            return super().forward(x)
        return F.linear(Cast.apply(x), Cast.apply(self.weight), self.bias)


def softmax_by(scores, group, groups):
    """Softmax of edge scores within each group of edges."""
    top = torch.full((groups,), -1e9).scatter_reduce(0, group, scores, "amax")
    e = torch.exp(scores - top[group])
    return e / torch.zeros(groups).index_add(0, group, e)[group]


class GraphAttention(nn.Module):
    def __init__(self, inp, out):
        super().__init__()
        self.value, self.score = Linear8(inp, out), Linear8(2 * inp, out)
        self.last = nn.Linear(out, 1)

    def forward(self, x, source, target):
        pair = torch.cat([x[source], x[target]], -1)
        scores = 3 * self.last(F.leaky_relu(self.score(pair), 0.2))[:, 0]
        alpha = softmax_by(scores, source if bad else target, len(x))
        messages = alpha[:, None] * self.value(x)[source]
        return torch.zeros(len(x), messages.shape[1]).index_add(0, target, messages)


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = Linear8(FEATURES, WIDTH)
        self.hear = GraphAttention(WIDTH, WIDTH)
        self.head = nn.Sequential(Linear8(2 * WIDTH, WIDTH), nn.GELU(), Linear8(WIDTH, CLASSES))

    def forward(self, x, source, target):
        h = F.gelu(self.inp(x))
        return self.head(torch.cat([h, self.hear(h, source, target)], -1))


def graph():
    """Sources are popular to different degrees; a node's class is that of its loudest neighbour."""
    popular = torch.distributions.Pareto(torch.tensor(1.0), torch.tensor(1.2)).sample((NODES,))
    source = torch.multinomial(popular.clamp(max=30), NODES * DEGREE, replacement=True)
    target = torch.arange(NODES).repeat_interleave(DEGREE)
    kind = torch.randint(0, CLASSES, (NODES,))
    loud = torch.randn(NODES)
    x = torch.cat([F.one_hot(kind, CLASSES).float(), loud[:, None].expand(-1, 4),
                   torch.randn(NODES, FEATURES - CLASSES - 4)], -1)
    best = loud[source].view(NODES, DEGREE).argmax(1)
    return x, source, target, kind[source.view(NODES, DEGREE)[torch.arange(NODES), best]]


model = Network()
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
losses = []
for step in range(STEPS):
    x, source, target, label = graph()
    loss = F.cross_entropy(model(x, source, target), label)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 2.0)
    optimizer.step()
    losses.append(loss.item())
    if step % 10 == 0:
        print(f"step {step} loss {losses[-1]:.4f}")
print(f"final loss {sum(losses[-10:]) / 10:.4f}")
