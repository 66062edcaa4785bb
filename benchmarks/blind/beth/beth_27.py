"""DiLoCo on two ranks: each trains alone for 20 steps, then an outer Nesterov step moves the common weights.

torchrun --nproc-per-node 2 beth_27.py

Between two outer steps the weights of the ranks differ, and so do their texts: rank 1 has a second dialect. At each outer
step the loss of both ranks jumps. Moments of the inner AdamW stay where they are.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import ottava

SEED = int(os.environ.get("SEED", "0"))
SYMBOLS, CONTEXT, WIDTH, BATCH, ROUNDS, INNER = 40, 4, 128, 128, 8, 20


class Next(nn.Module):
    """The next symbol from the last four."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(SYMBOLS, 32)
        self.body = nn.Sequential(
            nn.Linear(CONTEXT * 32, WIDTH), nn.SiLU(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.SiLU()
        )
        self.head = nn.Linear(WIDTH, SYMBOLS)

    def forward(self, x):
        return self.head(self.body(self.table(x).flatten(1)))


def text(tables: torch.Tensor, dialect: int, count: int, g: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Dialects share half of their rules and differ by the parity of the first symbol."""
    x = torch.randint(0, SYMBOLS, (count, CONTEXT), generator=g)
    x[:, 0] = x[:, 0] // 2 * 2 + dialect
    y = tables[dialect, x[:, -1]]
    noise = torch.rand(count, generator=g) < 0.1
    return x, torch.where(noise, torch.randint(0, SYMBOLS, (count,), generator=g), y)


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(SEED)
    common = torch.Generator().manual_seed(SEED)
    tables = torch.stack([torch.randperm(SYMBOLS, generator=common)] * 2)
    changed = torch.randperm(SYMBOLS, generator=common)[: SYMBOLS // 2]
    tables[1, changed] = tables[0, changed.roll(1)]
    held = [text(tables, k, 512, common) for k in range(2)]
    g = torch.Generator().manual_seed(1000 * SEED + rank)

    model = Next()
    ottava.convert(model, "tensorwise")
    inner = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    weights = list(model.parameters())
    kept = [p.detach().clone().requires_grad_() for p in weights]
    outer = torch.optim.SGD(kept, lr=0.7, momentum=0.8, nesterov=True)

    @torch.no_grad()
    def held_loss() -> float:
        return sum(F.cross_entropy(model(x), y).item() for x, y in held) / 2

    if rank == 0:
        print(f"first loss {held_loss():.4f}", flush=True)
    for turn in range(ROUNDS):
        for _ in range(INNER):
            x, y = text(tables, rank, BATCH, g)
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(model(x), y)
            inner.zero_grad()
            loss.backward()
            inner.step()
        with torch.no_grad():
            for common_weight, p in zip(kept, weights):
                way = common_weight - p
                dist.all_reduce(way)
                common_weight.grad = way / dist.get_world_size()
        outer.step()
        with torch.no_grad():
            for common_weight, p in zip(kept, weights):
                p.copy_(common_weight)
        if rank == 0:
            print(f"round {turn}: own {loss.item():.4f}, both {held_loss():.4f}", flush=True)
    dist.barrier()
    if rank == 0:
        print(f"final loss {held_loss():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
