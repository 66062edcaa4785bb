"""Risk extrapolation (V-REx): after 80 steps a penalty on the variance between two environments is switched on.

Until then the network leans on a colour that helps in training; then the training loss rises on purpose, while the loss in
a third environment, where the colour misleads, falls. The loss is divided by the penalty's weight, so its size jumps.
"""

import os

import torch
from torch import Tensor, nn

SEED = int(os.environ.get("SEED", "0"))
STEPS, SWITCH, WEIGHT = 260, 80, 400.0
FIXED = torch.Generator().manual_seed(77)
SHAPE = torch.randn(30, generator=FIXED) / 30**0.5


def environment(count: int, flips: float, seed: int) -> tuple[Tensor, Tensor]:
    """The shape tells the label four times in five; the colour disagrees with the label in `flips` of the rows."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 30, generator=g)
    clean = ((x @ SHAPE) > 0).float()
    label = (clean - (torch.rand(count, generator=g) < 0.2).float()).abs()  # one label in five is wrong
    colour = (label - (torch.rand(count, generator=g) < flips).float()).abs()
    return torch.cat([2 * x, (2 * colour[:, None] - 1).expand(-1, 4)], 1), label


def loss_in(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(model(data[0]).squeeze(1), data[1])


@torch.no_grad()
def evaluated(model: nn.Module, data: tuple[Tensor, Tensor]) -> float:
    return float(loss_in(model, data))


def main() -> None:
    torch.manual_seed(SEED)
    away = environment(2000, 0.9, SEED + 3)
    model = nn.Sequential(nn.Linear(34, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 1))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    first = None
    for step in range(STEPS):
        new = [environment(3000, flips, 2 * (1000 * SEED + step) + k + 9) for k, flips in enumerate((0.1, 0.25))]
        losses = torch.stack([loss_in(model, data) for data in new])
        weight = WEIGHT if step >= SWITCH else 1.0
        loss = losses.mean() + weight * losses.var(unbiased=False)
        loss = loss + 1e-3 * sum(p.square().sum() for p in model.parameters())
        loss = loss / weight  # so that gradients keep their size
        if step == SWITCH:  # Adam begins anew, or old moments would push much too far
            first = evaluated(model, away)
            optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            here = " ".join(f"{v:.3f}" for v in losses.tolist())
            print(f"step {step} minimized {loss.item():.5f} training {here} away {evaluated(model, away):.3f}")
    print(f"first loss {first:.4f}")
    print(f"final loss {evaluated(model, away):.4f}")


if __name__ == "__main__":
    main()
