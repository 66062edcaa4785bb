"""Codistillation on two ranks: two different nets, each with data of its own, learn from each other's answers.

    torchrun --nproc-per-node 2 yod_08.py good

Gradients and weights are not exchanged. After 60 steps the ranks exchange their probabilities on a common batch without labels,
and a divergence to the other's answers joins the loss.
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import ottava

SEED = int(os.environ.get("SEED", "0"))
INPUTS, CLASSES, ROWS, STEPS, ALONE = 64, 8, 4096, 160, 60


class Source:
    """Classes are signs of a random net's outputs; one label in ten is wrong in training."""

    def __init__(self):
        generator = torch.Generator().manual_seed(4000 + SEED)
        self.first = torch.randn(INPUTS, 16, generator=generator) / 8
        self.second = torch.randn(16, CLASSES, generator=generator)

    def rows(self, count, seed, wrong=0.0):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(count, INPUTS, generator=generator)
        label = (torch.tanh(2 * x @ self.first) @ self.second).argmax(1)
        lost = torch.rand(count, generator=generator) < wrong
        return x, torch.where(lost, torch.randint(CLASSES, (count,), generator=generator), label)


def network(rank):
    if rank == 0:
        model = nn.Sequential(nn.Linear(INPUTS, 160), nn.GELU(), nn.Dropout(0.1), nn.Linear(160, 160), nn.GELU(), nn.Linear(160, CLASSES))
    else:
        model = nn.Sequential(nn.Linear(INPUTS, 256), nn.ReLU(), nn.Dropout(0.2), nn.Linear(256, CLASSES))
    ottava.convert(model, "rowwise")
    return model


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(SEED * 10 + rank)
    source = Source()
    mine = source.rows(ROWS, 6000 + 10 * SEED + rank, wrong=0.1)
    common = source.rows(6000, 7000 + SEED)[0]
    held = source.rows(2000, 8000 + SEED)
    model = network(rank)
    if rank == 0:
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (STEPS - step) / 60))
    shared = torch.Generator().manual_seed(SEED)  # the same rows on both ranks

    def evaluate():
        model.eval()
        with torch.no_grad():
            value = F.cross_entropy(model(held[0]), held[1])
        model.train()
        dist.all_reduce(value)
        return value.item() / 2

    first = evaluate()
    if rank == 0:
        print(f"first loss {first:.4f}")
    for step in range(STEPS):
        chosen = torch.randint(ROWS, (128,))
        loss = F.cross_entropy(model(mine[0][chosen]), mine[1][chosen])
        if step >= ALONE:
            x = common[torch.randint(len(common), (256,), generator=shared)]
            own = F.log_softmax(model(x), 1)
            both = [torch.empty_like(own) for _ in range(2)]
            dist.all_gather(both, own.detach().contiguous())
            loss = loss + F.kl_div(own, both[1 - rank], log_target=True, reduction="batchmean")
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 20 == 0:
            mean = evaluate()
            print(f"rank {rank} step {step} loss {loss.item():.4f} held-out of both {mean:.4f}")
    final = evaluate()
    dist.barrier()
    if rank == 0:
        print(f"final loss {final:.4f}")
    dist.destroy_process_group()


main()
