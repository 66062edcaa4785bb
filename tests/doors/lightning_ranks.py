"""Two ranks of Lightning's DDP with OttavaPrecision, and the same training by torch's DDP: `... FOLDER RECIPE`."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import torch
from test_lightning import Net, batches, same, trainer
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import ottava
from ottava.doors.lightning import OttavaPrecision


def main(folder: str, recipe: str) -> None:
    """Prints one line on rank 0: whether losses, weights and histories are equal, and how many tensors there are."""
    warnings.simplefilter("ignore")
    rows = batches().dataset
    theirs, plain = Net(), Net()
    sampler = DistributedSampler(rows, num_replicas=2, rank=int(os.environ["RANK"]), shuffle=False)
    loader = DataLoader(rows, batch_size=8, sampler=sampler)
    settings = {"devices": 2, "strategy": "ddp", "use_distributed_sampler": False}
    trainer(OttavaPrecision(recipe), Path(folder), **settings).fit(theirs, loader)
    ottava.convert(plain, recipe)
    wrapped = DistributedDataParallel(plain.net)
    optimizer = plain.configure_optimizers()
    for _ in range(2):
        for (batch,) in loader:
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
                plain.losses.append(loss := wrapped(batch).float().square().mean())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    losses = [one.item() for one in theirs.losses] == [one.item() for one in plain.losses]
    answers: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, (losses and len(plain.losses) == 8, same(theirs, plain)))
    if dist.get_rank() == 0:
        print("answers", answers, len(plain.state_dict()))


if __name__ == "__main__":
    main(*sys.argv[1:])
