"""Joins the processes that torchrun has started."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any


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
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout), **_meeting_place())
    try:
        yield
    finally:
        dist.destroy_process_group()


def _meeting_place() -> dict[str, Any]:
    """A part of torchrun's store for this start. In torch 2.13 all restarts share that store, where the addresses of
    processes that have died still stand: the new ones would wait for them."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {}
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # torch exports them by name only

    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    name = f"ottava, restart {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    ranks = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
    return {"store": PrefixStore(name, store), **ranks}
