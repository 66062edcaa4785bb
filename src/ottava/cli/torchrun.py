"""Joins the processes that torchrun has started."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta


@contextmanager
def joined(timeout: float) -> Iterator[None]:
    """The processes of torchrun meet in it; a process that torchrun has not started is alone.

    Args:
        timeout: seconds that a process waits for the others.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield
        return
    import torch
    import torch.distributed as dist

    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    try:
        yield
    finally:
        dist.destroy_process_group()
