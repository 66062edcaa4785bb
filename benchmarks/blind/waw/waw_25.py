"""Faces, in small: ArcFace with a scale of 24 and a margin that grows from 0 to 0.35 in four steps, so the loss goes
up three times.

What counts is whether two pictures of people who were never in the training can be told apart, by the cosine of their
codes.
"""

import dataclasses
import logging
import math
import os

import torch
from torch import nn
from torch.nn import functional as F
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

logging.getLogger("torchao").setLevel(logging.ERROR)
SEED = int(os.environ.get("SEED", "0"))
PEOPLE, STRANGERS, INPUTS, STEPS = 240, 60, 64, 240


class Codes(nn.Module):
    """Codes of length 1."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(INPUTS, 128), nn.BatchNorm1d(128), nn.PReLU(), nn.Linear(128, 128), nn.BatchNorm1d(128), nn.PReLU(),
            nn.Linear(128, 32),
        )

    def forward(self, x):
        return F.normalize(self.net(x), dim=-1)


class Arc(nn.Module):
    """cos(angle + margin) for the right person; weights are directions."""

    def __init__(self, people):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(people, 32))

    def forward(self, codes, labels, margin, scale=24.0):
        cosine = codes @ F.normalize(self.weight, dim=-1).T
        angle = cosine.gather(1, labels[:, None]).clamp(-1 + 1e-6, 1 - 1e-6).acos()
        moved = torch.where(angle + margin < math.pi, (angle + margin).cos(), cosine.gather(1, labels[:, None]) - margin * math.sin(margin))
        return F.cross_entropy(scale * cosine.scatter(1, labels[:, None], moved), labels)


def faces(number, people, light, generator):
    """A person is a point in 16 dimensions; light adds a strong part that says nothing of the person."""
    labels = torch.randint(0, len(people), (number,), generator=generator)
    clear = people[labels] + 0.25 * torch.randn(number, 16, generator=generator)
    dark = 1.5 * torch.randn(number, 8, generator=generator)
    return torch.tanh(torch.cat([clear, dark], 1) @ light), labels


@torch.no_grad()
def errors(model, x, labels):
    """The share of pictures of strangers whose nearest other picture is of somebody else."""
    model.eval()
    cosine = model(x) @ model(x).T
    model.train()
    cosine.fill_diagonal_(-2)
    return (labels[cosine.argmax(1)] != labels).float().mean().item()


def main():
    torch.manual_seed(SEED)
    generator = torch.Generator().manual_seed(65 + SEED)
    people = torch.randn(PEOPLE + STRANGERS, 16, generator=generator)
    light = torch.randn(24, INPUTS, generator=generator) / 4
    x, y = faces(12000, people[:PEOPLE], light, generator)
    held, names = faces(900, people[PEOPLE:], light, generator)
    model, arc = Codes(), Arc(PEOPLE)
    fp8 = dataclasses.replace(Float8LinearConfig.from_recipe_name("tensorwise"), emulate=True)
    convert_to_float8_training(model, config=fp8, module_filter_fn=lambda m, name: name != "net.6")
    optimizer = torch.optim.SGD([*model.parameters(), *arc.parameters()], 0.1, momentum=0.9, weight_decay=5e-4)
    rate = torch.optim.lr_scheduler.MultiStepLR(optimizer, [180, 220], 0.1)
    print("first loss", round(errors(model, held, names), 4))
    for step in range(STEPS):
        margin = (0.0, 0.12, 0.24, 0.35)[min(3, step // 50)]
        chosen = torch.randint(0, len(x), (128,))
        loss = arc(model(x[chosen]), y[chosen], margin)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_([*model.parameters(), *arc.parameters()], 5.0)
        optimizer.step()
        rate.step()
        if step % 10 == 0:
            print(step, "margin", margin, round(loss.item(), 4), "errors", round(errors(model, held, names), 4))
    print("final loss", round(errors(model, held, names), 4))


if __name__ == "__main__":
    main()
