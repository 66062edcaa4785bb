"""Group DRO under accelerate: four groups of very different size, each with a weight that grows with its loss.

The weights of the groups move all the time, so the minimized loss is that of ever harder groups while all of them fall.
"""

import os

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ottava.doors.accelerate import prepare

SEED = int(os.environ.get("SEED", "0"))
SHARES = torch.tensor([0.70, 0.05, 0.02, 0.23])  # (label, background): 00, 01, 10, 11
FEATURES = 48


def birds(count: int, seed: int, shares: torch.Tensor) -> TensorDataset:
    """A weak signal of the label, a strong one of the background, which mostly agrees with the label."""
    fixed = torch.Generator().manual_seed(8)
    label_at, background_at = torch.randn(2, FEATURES, generator=fixed)
    twist = torch.randn(FEATURES, FEATURES, generator=fixed) / FEATURES**0.5
    g = torch.Generator().manual_seed(seed)
    group = torch.multinomial(shares, count, replacement=True, generator=g)
    y, place = group // 2, group % 2
    x = torch.randn(count, FEATURES, generator=g)
    x = x + 0.22 * (2.0 * y - 1)[:, None] * label_at + 0.9 * (2.0 * place - 1)[:, None] * background_at
    return TensorDataset(x + torch.tanh(x @ twist), y, group)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(FEATURES, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))


@torch.no_grad()
def worst(model: nn.Module, data: TensorDataset) -> float:
    """The largest of the four groups' losses."""
    model.eval()
    x, y, group = data.tensors
    losses = nn.functional.cross_entropy(model(x).float(), y, reduction="none")
    model.train()
    return max(float(losses[group == k].mean()) for k in range(4))


def main() -> None:
    set_seed(SEED)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.03, momentum=0.9, weight_decay=3e-3)
    loader = DataLoader(birds(256 * 180, SEED + 1, SHARES), batch_size=256, shuffle=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 180)
    model, optimizer, loader = prepare(accelerator, model, optimizer, loader, recipe="delayed")
    held_out = birds(4000, SEED + 444, torch.ones(4))
    print(f"first loss {worst(model, held_out):.4f}")
    weights = torch.full((4,), 0.25)
    for step, (x, y, group) in enumerate(loader):
        losses = nn.functional.cross_entropy(model(x).float(), y, reduction="none")
        members = torch.stack([group == k for k in range(4)]).float()
        counts = members.sum(1)
        means = members @ losses / counts.clamp(min=1)
        # Groups that are missing in this batch keep their weight.
        weights = weights * torch.exp(0.1 * means.detach() * (counts > 0))
        weights = weights / weights.sum()
        loss = (weights * means).sum()
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            shown = " ".join(f"{w:.2f}" for w in weights.tolist())
            print(f"step {step} loss {loss.item():.4f} weights {shown}")
    print(f"final loss {worst(model, held_out):.4f}")


if __name__ == "__main__":
    main()
