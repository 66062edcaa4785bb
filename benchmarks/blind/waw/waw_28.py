"""Hinton's Forward-Forward: three layers, each with its own loss and its own optimizer, and no gradient from one
layer to another.

A row with its true label is to have a large sum of squares in each layer, with a wrong label a small one. A layer's
loss begins near ln 2 or above, since the threshold is far from what the first weights give.
"""

import os

import torch
from torch import nn
from torch.nn import functional as F

SEED = int(os.environ.get("SEED", "0"))
INPUTS, CLASSES, STEPS, BATCH, THRESHOLD = 48, 6, 260, 128, 2.0


class Local(nn.Module):
    """A layer that learns alone. What it is given is brought to length 1 first, so that the last layer's answer is hidden."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.optimizer = torch.optim.Adam(self.linear.parameters(), 4e-3)

    def forward(self, x):
        x = x / (x.norm(dim=1, keepdim=True) + 1e-4) * x.shape[1] ** 0.5
        return torch.relu(self.linear(x))

    def learn(self, good, bad):
        """One step; returns both rows for the next layer, without a graph."""
        up, down = self(good), self(bad)
        far = torch.cat([THRESHOLD - up.square().mean(1), down.square().mean(1) - THRESHOLD])
        loss = F.softplus(far).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return up.detach(), down.detach(), loss.item()


def with_label(x, labels):
    """The label stands in front of the row."""
    return torch.cat([3 * F.one_hot(labels, CLASSES).float(), x], 1)


def rows(number, centres, generator):
    """Two centres for each class."""
    labels = torch.randint(0, CLASSES, (number,), generator=generator)
    which = torch.randint(0, 2, (number,), generator=generator)
    return centres[labels, which] + torch.randn(number, INPUTS, generator=generator), labels


@torch.no_grad()
def evaluate(layers, x, labels):
    """The share of rows for which another label has the larger sum over the layers."""
    scores = []
    for label in range(CLASSES):
        h, score = with_label(x, torch.full_like(labels, label)), 0.0
        for layer in layers:
            h = layer(h)
            score = score + h.square().mean(1)
        scores.append(score)
    return (torch.stack(scores, 1).argmax(1) != labels).float().mean().item()


def main():
    torch.manual_seed(SEED)
    generator = torch.Generator().manual_seed(56 + SEED)
    centres = torch.randn(CLASSES, 2, INPUTS, generator=generator)
    x, y = rows(6000, centres, generator)
    held = rows(1000, centres, generator)
    layers = [Local(INPUTS + CLASSES, 128), Local(128, 128), Local(128, 128)]
    print("first loss", round(evaluate(layers, *held), 4))
    for step in range(STEPS):
        chosen = torch.randint(0, len(x), (BATCH,))
        labels = y[chosen]
        wrong = (labels + torch.randint(1, CLASSES, labels.shape)) % CLASSES
        good, bad, seen = with_label(x[chosen], labels), with_label(x[chosen], wrong), []
        for layer in layers:
            good, bad, loss = layer.learn(good, bad)
            seen.append(round(loss, 4))
        if step % 20 == 0:
            print(step, "losses of the layers", seen, "wrong", round(evaluate(layers, *held), 4))
    print("final loss", round(evaluate(layers, *held), 4))


if __name__ == "__main__":
    main()
