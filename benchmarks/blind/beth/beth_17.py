"""Embeddings by triplets under accelerate: the loss is the mean over those triplets that still violate the margin.

Because solved triplets leave the mean, it hardly falls while their number does. What counts is the error of the nearest
neighbour on rows of classes that were never seen; that is the final loss.
"""

import os
from dataclasses import replace

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

SEED = int(os.environ.get("SEED", "0"))
INPUT, CODE, CLASSES, NEW, STEPS, MARGIN = 96, 8, 60, 24, 250, 0.3


def rows(codes: torch.Tensor, mix: torch.Tensor, each: int, g: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """A class is a point in a small space; most directions of a row are loud and say nothing."""
    labels = torch.arange(len(codes)).repeat_interleave(each)
    code = codes[labels] + 0.1 * torch.randn(len(labels), CODE, generator=g)
    noise = 1.2 * torch.randn(len(labels), INPUT - CODE, generator=g)
    return torch.cat([code, noise], 1) @ mix, labels


def triplets(z: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    distance = torch.cdist(z, z)
    same = labels[:, None] == labels[None]
    positive = same & ~torch.eye(len(z), dtype=torch.bool)
    each = F.relu(distance[:, :, None] - distance[:, None, :] + MARGIN)
    counts = positive[:, :, None] & ~same[:, None, :]
    each = each[counts]
    active = each > 0
    return each.sum() / active.sum().clamp(min=1), active.float().mean()


@torch.no_grad()
def error(model, x: torch.Tensor, labels: torch.Tensor) -> float:
    z = F.normalize(model(x), dim=-1)
    distance = torch.cdist(z, z).fill_diagonal_(float("inf"))
    return (labels[distance.argmin(1)] != labels).float().mean().item()


def main() -> None:
    torch.manual_seed(SEED)
    g = torch.Generator().manual_seed(SEED + 3)
    mix = torch.linalg.qr(torch.randn(INPUT, INPUT, generator=g))[0]
    seen, unseen = torch.randn(CLASSES, CODE, generator=g), torch.randn(NEW, CODE, generator=g)
    x, labels = rows(seen, mix, 40, g)
    held_x, held_labels = rows(unseen, mix, 12, g)

    model = nn.Sequential(nn.Linear(INPUT, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 32))
    float8 = replace(Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp"), emulate=True)
    convert_to_float8_training(model, config=float8, module_filter_fn=lambda m, name: name != "4")
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05))

    print(f"first loss {error(model, held_x, held_labels):.4f}")
    for step in range(STEPS):
        classes = torch.randperm(CLASSES, generator=g)[:12]
        at = (classes[:, None] * 40 + torch.randint(0, 40, (12, 5), generator=g)).flatten()
        loss, active = triplets(F.normalize(model(x[at]), dim=-1), labels[at])
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if step % 30 == 0:
            print(f"{step:4d}  {loss.item():.4f}  active {active.item():.3f}")
    print(f"final loss {error(model, held_x, held_labels):.4f}")


if __name__ == "__main__":
    main()
