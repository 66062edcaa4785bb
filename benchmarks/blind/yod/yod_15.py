"""Distillation of a data set: ten pictures, one for each class, from which a fresh net learns what it can in six steps.

    python yod_15.py good

What the optimizer moves are the pictures and the rate of the inner steps. Each outer step begins with a new random net.
"""

import os

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

SEED = int(os.environ.get("SEED", "0"))
CLASSES, SIDE, INNER, STEPS = 10, 8, 6, 200


class Source:
    def __init__(self, generator):
        self.generator = generator
        self.shapes = (torch.rand(CLASSES, 2, SIDE, SIDE, generator=generator) > 0.55).float()

    def batch(self, count):
        label = torch.randint(CLASSES, (count,), generator=self.generator)
        which = torch.randint(2, (count,), generator=self.generator)
        noise = torch.randn(count, SIDE, SIDE, generator=self.generator)
        return (self.shapes[label, which] - 0.45 + 0.5 * noise).flatten(1), label


def fresh():
    return nn.Sequential(nn.Linear(SIDE * SIDE, 64), nn.GELU(), nn.Linear(64, CLASSES))


def taught(net, pictures, names, rate, graph):
    """The weights of the net after the inner steps, as functions of the pictures."""
    weights = dict(net.named_parameters())
    for _ in range(INNER):
        loss = F.cross_entropy(functional_call(net, weights, (pictures,)), names)
        slopes = torch.autograd.grad(loss, list(weights.values()), create_graph=graph)
        weights = {name: w - rate * s for (name, w), s in zip(weights.items(), slopes)}
    return weights


def score(pictures, names, rate, held):
    values = []
    for _ in range(10):
        net = fresh()
        weights = taught(net, pictures.detach(), names, rate.detach(), graph=False)
        with torch.no_grad():
            values.append(F.cross_entropy(functional_call(net, weights, (held[0],)), held[1]))
    return torch.stack(values).mean().item()


def main():
    torch.manual_seed(SEED)
    source = Source(torch.Generator().manual_seed(15 + SEED))
    held = source.batch(1500)
    names = torch.arange(CLASSES)
    pictures = nn.Parameter(0.5 * torch.randn(CLASSES, SIDE * SIDE))
    log_rate = nn.Parameter(torch.tensor(0.3).log())
    optimizer = torch.optim.Adam([{"params": [pictures], "lr": 0.03}, {"params": [log_rate], "lr": 0.01}])
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    print(f"first loss {score(pictures, names, log_rate.exp(), held):.4f}")
    for step in range(STEPS):
        net = fresh()
        weights = taught(net, pictures, names, log_rate.exp(), graph=True)
        x, label = source.batch(256)
        loss = F.cross_entropy(functional_call(net, weights, (x,)), label)
        optimizer.zero_grad()
        loss.backward(inputs=[pictures, log_rate])
        nn.utils.clip_grad_norm_([pictures, log_rate], 1.0)
        optimizer.step()
        schedule.step()
        if step % 25 == 0:
            print(f"step {step} loss {loss.item():.4f} inner rate {log_rate.exp().item():.3f}")
    print(f"final loss {score(pictures, names, log_rate.exp(), held):.4f}")


main()
