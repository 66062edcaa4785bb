"""Three widths in one run under maximal-update parametrization: the best rate of the narrowest net is used for the widest.

First three short trainings of a narrow net with rates far apart, of which the smallest is too small and
the largest too large; then the wide net is trained with the best one, its matrices at a rate that is divided by the ratio of widths.
The read-out begins at 0 and its output is divided by the ratio, too.
"""

import os

import torch
from torch import Tensor, nn

import ottava

SEED = int(os.environ.get("SEED", "0"))
BASE, WORDS, LENGTH = 32, 40, 16
RATES = [4e-3, 3.2e-2, 5e-1]


def text(rows: int, seed: int) -> Tensor:
    """The next word follows from the last one and the first one of the row."""
    table = torch.randint(WORDS, (5, WORDS), generator=torch.Generator().manual_seed(30))
    g = torch.Generator().manual_seed(seed)
    words = [torch.randint(WORDS, (rows,), generator=g)]
    for _ in range(LENGTH - 1):
        known, stray = table[words[0] % 5, words[-1]], torch.randint(WORDS, (rows,), generator=g)
        words.append(torch.where(torch.rand(rows, generator=g) < 0.85, known, stray))
    return torch.stack(words, 1)


class Block(nn.Module):
    """Attention with a scale of 1 / d instead of 1 / sqrt(d), and an MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 2 * width, bias=False), nn.Linear(2 * width, width, bias=False)
        for layer in (self.qkv, self.out, self.up, self.down):
            nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
        nn.init.zeros_(self.qkv.weight[:width].data)  # queries begin at 0

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = (t.view(rows, length, 2, -1).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        scale = 4.0 / (width // 2)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ratio = width / BASE
        self.table, self.places = nn.Embedding(WORDS, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS, bias=False)
        nn.init.zeros_(self.head.weight)

    def forward(self, rows: Tensor) -> Tensor:
        x = self.table(rows[:, :-1]) + self.places.weight[: rows.shape[1] - 1]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)) / self.ratio
        return nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())

    def groups(self, rate: float) -> list[dict]:
        """Hidden matrices have a rate that falls with the width; tables, norms and the head keep it."""
        hidden = [p for p in self.blocks.parameters() if p.ndim == 2]
        rest = [p for p in self.parameters() if not any(p is h for h in hidden)]
        return [{"params": hidden, "lr": rate / self.ratio}, {"params": rest, "lr": rate}]


@torch.no_grad()
def loss_of(model: Net) -> float:
    return float(model(text(128, SEED + 4242)))


def train(width: int, rate: float, steps: int) -> Net:
    torch.manual_seed(SEED)
    model = Net(width)
    ottava.convert(model, "guarded")
    print(f"width {width} rate {rate:g}")
    print(f"first loss {loss_of(model):.4f}")
    optimizer = torch.optim.Adam(model.groups(rate), betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min((s + 1) / 10, (steps - s) / steps))
    for step in range(steps):
        loss = model(text(32, SEED * 7000 + step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 20 == 0:
            print(f"step {step} loss {loss.item():.4f}")
    return model


def main() -> None:
    found = {rate: loss_of(train(BASE, rate, 50)) for rate in RATES}
    print("short trainings", {rate: round(loss, 4) for rate, loss in found.items()})
    best = min(found, key=found.get)
    model = train(128, best, 130)
    print(f"final loss {loss_of(model):.4f}")


if __name__ == "__main__":
    main()
