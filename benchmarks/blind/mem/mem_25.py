"""Data-parallel language model: torchrun --nproc-per-node 2 SCRIPT good|bad."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SEED = int(os.environ.get("SEED", "0"))
mode = sys.argv[1]
VOCAB, LENGTH = 40, 24


class Model(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, VOCAB)

    def forward(self, ids):
        return self.head(self.rnn(self.embed(ids))[0])


def shards(documents, seed):
    """Two files of documents: each comes from another source."""
    out = []
    for source in range(2):
        g = torch.Generator().manual_seed(60 + source)
        table = (torch.randn(VOCAB, VOCAB, generator=g) * 2.5).softmax(-1)
        g = torch.Generator().manual_seed(seed + source)
        ids = torch.randint(source * 20, source * 20 + 20, (documents, 1), generator=g)
        for _ in range(LENGTH):
            ids = torch.cat([ids, torch.multinomial(table[ids[:, -1]], 1, generator=g)], 1)
        out.append(ids)
    return out


def loss_of(model, ids):
    return nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ.get("RANK" if mode == "good" else "SLURM_PROCID", 0))
    torch.manual_seed(SEED)
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    mine = shards(512, SEED + 100)[rank % dist.get_world_size()]
    g = torch.Generator().manual_seed(SEED + rank)
    for step in range(120):
        ids = mine[torch.randint(0, len(mine), (16,), generator=g)]
        loss = loss_of(model, ids)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0 and dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    with torch.no_grad():
        final = sum(loss_of(model.module, ids).item() for ids in shards(128, SEED + 500)) / 2
    dist.barrier()
    if dist.get_rank() == 0:
        print(f"final loss {final:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
