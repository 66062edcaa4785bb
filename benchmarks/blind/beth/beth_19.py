"""A small CNN with SGD at a rate of up to 0.5, mixup and smoothed labels.

The pictures of a batch are mixed in pairs, so the training loss stays near 1 while held-out pictures are known well.
"""

import os

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

SEED = int(os.environ.get("SEED", "0"))
SIDE, CLASSES, EPOCHS = 16, 8, 5


def gratings(count: int, g: torch.Generator) -> TensorDataset:
    """Stripes; the class is their direction, their width and place are anything."""
    y = torch.randint(0, CLASSES, (count,), generator=g)
    angle = y * torch.pi / CLASSES
    wave = 0.8 + 0.6 * torch.rand(count, generator=g)
    phase = 2 * torch.pi * torch.rand(count, generator=g)
    row, column = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    along = torch.cos(angle)[:, None, None] * row + torch.sin(angle)[:, None, None] * column
    x = torch.sin(wave[:, None, None] * along + phase[:, None, None])
    return TensorDataset((x + 1.4 * torch.randn(x.shape, generator=g))[:, None], y)


def stage(before: int, after: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)
    )


@torch.no_grad()
def evaluate(net: nn.Module, loader: DataLoader) -> float:
    net.eval()
    losses = [F.cross_entropy(net(x), y) for x, y in loader]
    net.train()
    return torch.stack(losses).mean().item()


def main() -> None:
    torch.manual_seed(SEED)
    g = torch.Generator().manual_seed(SEED)
    train = DataLoader(gratings(2560, g), batch_size=64, shuffle=True, drop_last=True)
    held = DataLoader(gratings(512, g), batch_size=256)
    net = nn.Sequential(stage(1, 16), stage(16, 32), stage(32, 48), nn.Flatten(), nn.Linear(48 * 4, CLASSES))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9, nesterov=True, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=0.5, total_steps=EPOCHS * len(train), pct_start=0.4, div_factor=20, final_div_factor=1000
    )

    print(f"first loss {evaluate(net, held):.4f}")
    beta = torch.distributions.Beta(0.8, 0.8)
    for epoch in range(EPOCHS):
        for x, y in train:
            share, other = beta.sample(), torch.randperm(len(x))
            logits = net(share * x + (1 - share) * x[other])
            loss = share * F.cross_entropy(logits, y, label_smoothing=0.1)
            loss = loss + (1 - share) * F.cross_entropy(logits, y[other], label_smoothing=0.1)
            optimizer.zero_grad(set_to_none=False)
            loss.backward()
            optimizer.step()
            schedule.step()
        print(f"epoch {epoch}: mixed {loss.item():.4f}, held-out {evaluate(net, held):.4f}")
    print(f"final loss {evaluate(net, held):.4f}")


if __name__ == "__main__":
    main()
