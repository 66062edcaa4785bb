"""A tree in the Poincare ball: gradients are rescaled by hand for curved space, with a burn-in at a tenth of the rate.

Nodes begin within 0.001 of the origin, so all distances are near 0 and the loss stands at that of a guess at first. The
rate is 1 with plain SGD, and vectors that leave the ball are put back.
"""

import os

import torch
from torch import Tensor, nn

SEED = int(os.environ.get("SEED", "0"))
DEPTH, BRANCHES, OTHERS, STEPS, BURN_IN = 5, 3, 20, 300, 60
COUNT = sum(BRANCHES**d for d in range(DEPTH + 1))
EDGE = 1 - 1e-4


def ancestors() -> Tensor:
    """All pairs of a node and one of its ancestors; node k has the parent (k - 1) // 3."""
    pairs = []
    for node in range(1, COUNT):
        above = node
        while above:
            above = (above - 1) // BRANCHES
            pairs.append((node, above))
    return torch.tensor(pairs)


def distance(u: Tensor, v: Tensor) -> Tensor:
    gap = (u - v).square().sum(-1)
    room = (1 - u.square().sum(-1)) * (1 - v.square().sum(-1))
    return torch.acosh((1 + 2 * gap / room).clamp(min=1 + 1e-9))


class RiemannianSGD:
    """SGD on the ball: the gradient times ((1 - |x|^2) / 2)^2, then a projection into the ball."""

    def __init__(self, table: nn.Parameter, rate: float) -> None:
        self.table, self.rate = table, rate

    @torch.no_grad()
    def step(self, factor: float) -> None:
        squared = self.table.square().sum(-1, keepdim=True)
        self.table.sub_(factor * self.rate * self.table.grad * ((1 - squared) / 2).square())
        norm = self.table.norm(dim=-1, keepdim=True)
        self.table.mul_(torch.where(norm > EDGE, EDGE / norm, torch.ones_like(norm)))
        self.table.grad = None


@torch.no_grad()
def missed(table: Tensor, related: Tensor) -> float:
    """One minus the mean average precision of ancestors and descendants by distance."""
    apart = distance(table[:, None], table[None])
    apart.fill_diagonal_(float("inf"))
    order = apart.argsort(1)
    hits = related.gather(1, order).float()
    precision = hits.cumsum(1) / torch.arange(1, COUNT + 1)
    return float(1 - ((precision * hits).sum(1) / hits.sum(1)).mean())


def main() -> None:
    torch.manual_seed(SEED)
    pairs = ancestors()
    related = torch.zeros(COUNT, COUNT, dtype=torch.bool)
    related[pairs[:, 0], pairs[:, 1]] = related[pairs[:, 1], pairs[:, 0]] = True
    table = nn.Parameter((2e-3 * torch.rand(COUNT, 5, dtype=torch.float64) - 1e-3))
    optimizer = RiemannianSGD(table, 1.0)
    print(f"{COUNT} nodes, {len(pairs)} pairs")
    print(f"first loss {missed(table, related):.4f}")
    for step in range(STEPS):
        chosen = pairs[torch.randint(len(pairs), (256,))]
        left, right = chosen.unbind(1)
        turned = torch.rand(256) < 0.5
        left, right = torch.where(turned, right, left), torch.where(turned, left, right)
        # Strangers are nodes that are no relatives; a relative among the drawn ones has no weight.
        others = torch.randint(COUNT, (256, OTHERS))
        relatives = related[left[:, None], others] | (others == left[:, None])
        near = -distance(table[left], table[right])[:, None]
        far = (-distance(table[left][:, None], table[others])).masked_fill(relatives, float("-inf"))
        scores = torch.cat([near, far], 1)
        loss = nn.functional.cross_entropy(scores, torch.zeros(256, dtype=torch.long), reduction="sum") / 8
        loss.backward()
        optimizer.step(0.1 if step < BURN_IN else 1.0)
        if step % 30 == 0:
            print(f"step {step} loss {loss.item() / 32:.4f} largest norm {float(table.detach().norm(dim=1).max()):.3f}")
    print(f"final loss {missed(table.detach(), related):.4f}")


if __name__ == "__main__":
    main()
