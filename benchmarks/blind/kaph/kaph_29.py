"""Mixture of depths: in every second block only the quarter of words that a router picks is processed, the rest passes by.

Words are picked per row by their score, which also multiplies the result, so the router has a gradient only from picked
words. Matrices under Muon by hand, the rest under AdamW; blocks are computed again for backward.
"""

import os

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ottava

SEED = int(os.environ.get("SEED", "0"))
WORDS, LENGTH, WIDTH, STEPS = 50, 32, 64, 150


def text(rows: int, seed: int) -> Tensor:
    """Runs of a fixed order; after a mark (word 0) the word of eight places before it comes again."""
    g = torch.Generator().manual_seed(seed)
    words = torch.empty(rows, LENGTH, dtype=torch.long)
    words[:, :8] = torch.randint(1, WORDS, (rows, 8), generator=g)
    marks = torch.rand(rows, LENGTH, generator=g) < 0.15
    for t in range(8, LENGTH):
        onward = words[:, t - 1] * 7 % (WORDS - 1) + 1
        known = torch.where(words[:, t - 1] == 0, words[:, t - 8].clamp(min=1), onward)
        words[:, t] = known * ~(marks[:, t] & (words[:, t - 1] != 0))
    return words


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """The change of the stream."""
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        change = self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return change + self.down(nn.functional.gelu(self.up(self.norm2(x + change))))


class Skipping(nn.Module):
    """A block for the quarter of words with the highest score; their order stays."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.router = Block(), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).squeeze(-1)
        picked = scores.topk(x.shape[1] // 4, 1).indices.sort(1).values
        at = picked.unsqueeze(-1).expand(-1, -1, WIDTH)
        change = self.block(x.gather(1, at)) * torch.sigmoid(scores.gather(1, picked)).unsqueeze(-1)
        return torch.zeros_like(x).scatter(1, at, change)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Block(), Skipping(), Block(), Skipping()])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, rows: Tensor) -> Tensor:
        x = self.table(rows) + self.places.weight
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        logits = self.head(self.norm(x))[:, 7:-1]
        return nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 8:].flatten())


class Muon:
    """Momentum brought near an orthogonal matrix by five Newton-Schulz steps."""

    def __init__(self, matrices: list[Tensor], rate: float) -> None:
        self.matrices, self.rate = matrices, rate
        self.momentum = [torch.zeros_like(p) for p in matrices]

    @torch.no_grad()
    def step(self, factor: float) -> None:
        for p, m in zip(self.matrices, self.momentum, strict=True):
            m.mul_(0.95).add_(p.grad)
            x = nn.functional.normalize((p.grad + 0.95 * m).flatten(), dim=0).view_as(p)
            for _ in range(5):
                a = x @ x.T if x.shape[0] <= x.shape[1] else x.T @ x
                b = -4.7750 * a + 2.0315 * a @ a
                x = 3.4445 * x + (b @ x if x.shape[0] <= x.shape[1] else x @ b)
            p.sub_(factor * self.rate * max(1.0, p.shape[0] / p.shape[1]) ** 0.5 * x)


def main() -> None:
    torch.manual_seed(SEED)
    model = Net()
    ottava.convert(model, "nvfp4_rht")
    matrices = [p for n, p in model.blocks.named_parameters() if p.ndim == 2 and "router" not in n]
    rest = [p for p in model.parameters() if not any(p is m for m in matrices)]
    muon, adam = Muon(matrices, 0.02), torch.optim.AdamW(rest, 3e-3)
    held_out = text(96, SEED + 31337)
    with torch.no_grad():
        print(f"first loss {model(held_out).item():.4f}")
    for step in range(STEPS):
        loss = model(text(24, SEED * 5000 + step))
        model.zero_grad()
        loss.backward()
        factor = min(1.0, 2 * (1 - step / STEPS))
        muon.step(factor)
        adam.param_groups[0]["lr"] = 3e-3 * factor
        adam.step()
        if step % 15 == 0:
            print(f"step {step} loss {loss.item():.4f}")
    with torch.no_grad():
        print(f"final loss {model(held_out).item():.4f}")


if __name__ == "__main__":
    main()
