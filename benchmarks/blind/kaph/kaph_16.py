"""Two ranks with signSGD by majority: each sends only the signs of its momentum, and a step is where both agree.

Where the signs differ the sum is 0 and the weight stays, so many entries do not move. torchrun --nproc-per-node 2.
"""

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn

import ottava

SEED = int(os.environ.get("SEED", "0"))
WORDS, LENGTH, STEPS = 48, 16, 120


def text(rows: int, generator: torch.Generator, sure: float) -> Tensor:
    """The next word follows from the last two; how often depends on the rank's source."""
    table = torch.randint(WORDS, (4, WORDS), generator=torch.Generator().manual_seed(4))
    words = [torch.randint(WORDS, (rows,), generator=generator) for _ in range(2)]
    for _ in range(LENGTH - 2):
        known = table[words[-2] % 4, words[-1]]
        stray = torch.randint(WORDS, (rows,), generator=generator)
        words.append(torch.where(torch.rand(rows, generator=generator) < sure, known, stray))
    return torch.stack(words, 1)


class Net(nn.Module):
    """An MLP on the last two words."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, 32)
        self.body = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU())
        self.head = nn.Linear(128, WORDS)

    def forward(self, rows: Tensor) -> Tensor:
        codes = self.table(rows)
        return self.head(self.body(torch.cat([codes[:, :-1], codes[:, 1:]], -1)))


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    logits = model(rows[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 2:].flatten())


@torch.no_grad()
def held_out(model: nn.Module) -> float:
    """The mean of both sources, the same rows on both ranks."""
    g = torch.Generator().manual_seed(SEED + 900)
    return float(sum(loss_of(model, text(128, g, sure)) for sure in (0.95, 0.8)) / 2)


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(SEED)  # the same first weights on both ranks
    model = Net()
    ottava.convert(model, "tensorwise")
    generator = torch.Generator().manual_seed(SEED * 100 + rank + 1)
    momentum = [torch.zeros_like(p) for p in model.parameters()]
    if rank == 0:
        print(f"first loss {held_out(model):.4f}", flush=True)
    for step in range(STEPS):
        loss = loss_of(model, text(64, generator, (0.95, 0.8)[rank]))
        loss.backward()
        rate = 2e-3 * min(1.0, (step + 1) / 10) * (1 - step / STEPS)
        with torch.no_grad():
            for parameter, average in zip(model.parameters(), momentum, strict=True):
                average.mul_(0.9).add_(parameter.grad, alpha=0.1)
                vote = average.sign().to(torch.int8)
                dist.all_reduce(vote)
                parameter.sub_(rate * vote.sign().to(parameter.dtype))
        model.zero_grad()
        if step % 20 == 0:
            print(f"rank {rank} step {step} loss {loss.item():.4f}", flush=True)
    final = held_out(model)
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        print(f"final loss {final:.4f}", flush=True)


if __name__ == "__main__":
    main()
