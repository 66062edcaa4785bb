"""Architecture search (DARTS, first order) under accelerate: weights learn on one half of the data, choices on the other.

Two optimizers in turns; after the search the best operations are kept and a new, smaller network is trained from scratch.
"""

import os

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor, nn

SEED = int(os.environ.get("SEED", "0"))
CHANNELS, CLASSES = 8, 5


def signals(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Short signals with one of five shapes at a random place."""
    g = torch.Generator().manual_seed(seed)
    t = torch.arange(7.0)
    shapes = torch.stack([torch.sin(t), torch.cos(t), (t - 3).sign(), (t % 2) * 2 - 1, 1.5 - (t - 3).abs() / 1.5])
    label = torch.randint(CLASSES, (count,), generator=g)
    x = 0.5 * torch.randn(count, 1, 48, generator=g)
    start = torch.randint(0, 41, (count,), generator=g)
    x[torch.arange(count)[:, None], 0, start[:, None] + torch.arange(7)] += shapes[label]
    return x, label


def operations() -> nn.ModuleList:
    def conv(width: int, dilation: int = 1) -> nn.Module:
        pad = dilation * (width - 1) // 2
        layer = nn.Conv1d(CHANNELS, CHANNELS, width, padding=pad, dilation=dilation, bias=False)
        return nn.Sequential(layer, nn.BatchNorm1d(CHANNELS, affine=False), nn.ReLU())

    return nn.ModuleList([nn.Identity(), nn.AvgPool1d(3, 1, 1), conv(3), conv(7), conv(3, 3)])


class Mixed(nn.Module):
    """A weighted sum of all operations."""

    def __init__(self) -> None:
        super().__init__()
        self.choices = operations()
        self.alpha = nn.Parameter(1e-3 * torch.randn(len(self.choices)))

    def forward(self, x: Tensor) -> Tensor:
        return sum(a * op(x) for a, op in zip(self.alpha.softmax(0), self.choices, strict=True))


def network(cells: list[nn.Module]) -> nn.Sequential:
    stem = [nn.Conv1d(1, CHANNELS, 3, padding=1), nn.BatchNorm1d(CHANNELS)]
    return nn.Sequential(*stem, *cells, nn.AdaptiveMaxPool1d(1), nn.Flatten(), nn.Linear(CHANNELS, CLASSES))


@torch.no_grad()
def loss_of(model: nn.Module, data: tuple[Tensor, Tensor]) -> float:
    model.eval()
    loss = float(nn.functional.cross_entropy(model(data[0]), data[1]))
    model.train()
    return loss


def main() -> None:
    set_seed(SEED)
    accelerator = Accelerator(cpu=True)
    x, y = signals(4096, SEED + 1)
    held_out = signals(512, SEED + 55)
    supernet = network([Mixed() for _ in range(3)])
    alphas = [p for n, p in supernet.named_parameters() if n.endswith("alpha")]
    weights = [p for n, p in supernet.named_parameters() if not n.endswith("alpha")]
    by_weights = torch.optim.SGD(weights, 0.1, momentum=0.9, weight_decay=3e-4)
    by_alphas = torch.optim.Adam(alphas, 0.02, betas=(0.5, 0.999), weight_decay=1e-3)
    supernet, by_weights, by_alphas = accelerator.prepare(supernet, by_weights, by_alphas)
    for step in range(100):
        for optimizer, low in ((by_alphas, 2048), (by_weights, 0)):
            rows = low + torch.randint(2048, (64,))
            loss = nn.functional.cross_entropy(supernet(x[rows]), y[rows])
            accelerator.backward(loss)
            if optimizer is by_weights:
                accelerator.clip_grad_norm_(weights, 5.0)
            optimizer.step()
            by_weights.zero_grad()  # the other half's gradients are not used
            by_alphas.zero_grad()
        if step % 20 == 0:
            print(f"search {step} loss {loss.item():.4f}")
    chosen = [int(alpha.argmax()) for alpha in alphas]
    print("chosen operations", chosen)

    model = network([operations()[k] for k in chosen])
    print(f"first loss {loss_of(model, held_out):.4f}")
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=3e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 160)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    for step in range(160):
        rows = torch.randint(4096, (64,))
        loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            print(f"train {step} loss {loss.item():.4f}")
    print(f"final loss {loss_of(model, held_out):.4f}")


if __name__ == "__main__":
    main()
