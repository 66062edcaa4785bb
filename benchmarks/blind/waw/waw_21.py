"""torchrun --nproc-per-node 2: data parallel with gradients that are sent compressed (PowerSGD, rank 2, with error
feedback).

For 30 steps they are sent whole. From then on the gradient of a matrix is of low rank, what is left out comes later.
Ranks read other shards.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import ottava

SEED = int(os.environ.get("SEED", "0"))
WORDS, CONTEXT, STEPS, BATCH = 40, 8, 160, 48


class Net(nn.Module):
    """The next word from the eight before it."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(WORDS, 32)
        self.places = nn.Parameter(0.02 * torch.randn(CONTEXT, 32))
        layer = nn.TransformerEncoderLayer(32, 4, 128, dropout=0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, WORDS))

    def forward(self, x):
        return self.head(self.body(self.table(x) + self.places)[:, -1])


def text(number, follower, generator):
    """The next word follows from the one three places back, but for one in ten."""
    rows = [torch.randint(0, WORDS, (number,), generator=generator) for _ in range(3)]
    for _ in range(CONTEXT - 2):
        odd = torch.rand(number, generator=generator) < 0.1
        rows.append(torch.where(odd, torch.randint(0, WORDS, (number,), generator=generator), follower[rows[-3]]))
    return torch.stack(rows, 1)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(SEED)
    generator = torch.Generator().manual_seed(26 + SEED)
    follower = torch.randperm(WORDS, generator=generator)
    held = text(600, follower, generator)
    shard = text(4000, follower, torch.Generator().manual_seed(1000 * (rank + 1) + SEED))

    model = Net()
    report = ottava.convert(model, "tensorwise")
    if rank == 0:
        print(report)
    parallel = DistributedDataParallel(model)
    state = powersgd.PowerSGDState(
        process_group=None, matrix_approximation_rank=2, start_powerSGD_iter=30, min_compression_rate=1.5,
        use_error_feedback=True, warm_start=True, random_seed=SEED,
    )
    parallel.register_comm_hook(state, powersgd.powerSGD_hook)
    optimizer = torch.optim.SGD(parallel.parameters(), 0.2, momentum=0.9, nesterov=True)
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS, eta_min=0.005)

    @torch.no_grad()
    def evaluate():
        model.eval()
        loss = F.cross_entropy(model(held[:, :-1]), held[:, -1]).item()
        model.train()
        return loss

    first = evaluate()
    if rank == 0:
        print("first loss", round(first, 4), flush=True)
    picks = torch.Generator().manual_seed(rank + 10 * SEED)
    for step in range(STEPS):
        rows = shard[torch.randint(0, len(shard), (BATCH,), generator=picks)]
        loss = F.cross_entropy(parallel(rows[:, :-1]), rows[:, -1])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parallel.parameters(), 1.0)
        optimizer.step()
        rate.step()
        if step % 20 == 0 and rank == 0:
            print(step, round(loss.item(), 4), "held", round(evaluate(), 4), flush=True)
    final = evaluate()
    dist.barrier()
    if rank == 0:
        print("final loss", round(final, 4), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
