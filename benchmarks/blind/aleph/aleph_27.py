"""Two ranks with data of their own (one has easy rows, the other hard ones), three micro-batches a step; torchrun --nproc-per-node 2."""
import contextlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import ottava

SEED = int(os.environ.get("SEED", 0))
STEPS, MICRO, ROWS, LENGTH, VOCABULARY, WIDTH = 60, 3, 8, 16, 40, 64


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight  # tied
        nn.init.normal_(self.embed.weight, std=0.1)

    def forward(self, tokens):
        h, _ = self.rnn(self.embed(tokens))
        h = h + self.mlp(self.norm(h))
        return self.head(h)


def rows(count, stray, table, generator):
    """The next token follows from this one, or with probability `stray` from nothing."""
    tokens = torch.randint(0, VOCABULARY, (count, LENGTH + 1), generator=generator)
    for i in range(LENGTH):
        follows = torch.rand(count, generator=generator) >= stray
        tokens[:, i + 1] = torch.where(follows, table[tokens[:, i]], tokens[:, i + 1])
    return tokens


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(SEED)  # the same weights everywhere
    table = torch.randperm(VOCABULARY)
    model = Model()
    report = ottava.convert(model, "tensorwise", filter=lambda name, layer: "mlp" in name)
    if rank == 0:
        print(report)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=STEPS, pct_start=0.2)
    generator = torch.Generator().manual_seed(1000 * SEED + rank)
    stray = 0.02 if rank == 0 else 0.4  # two shards of a corpus that is stored by source
    losses = []
    for step in range(STEPS):
        total = torch.zeros(())
        for micro in range(MICRO):
            tokens = rows(ROWS, stray, table, generator)
            last = micro == MICRO - 1
            with contextlib.nullcontext() if last else model.no_sync():
                out = model(tokens[:, :-1])
                loss = F.cross_entropy(out.flatten(0, 1), tokens[:, 1:].flatten())
                (loss / MICRO).backward()
            total += loss.detach() / MICRO
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        own = total.item()
        dist.all_reduce(total)
        losses.append(total.item() / world)
        if step % 10 == 0:
            print(f"rank {rank} step {step} own loss {own:.4f} loss of all {losses[-1]:.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        print(f"first loss {losses[0]:.4f}")
        print(f"final loss {sum(losses[-5:]) / 5:.4f}", flush=True)


if __name__ == "__main__":
    main()
