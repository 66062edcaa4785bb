"""Joins the processes that torchrun has started, and prints their common errors once."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

PATIENCE = 5.0
"""Seconds that a process waits for the error of rank 0."""
_ERROR = "ottava/error"


@contextmanager
def joined(timeout: float) -> Iterator[None]:
    """Joins the processes of torchrun to a process group in the block; without torchrun it does nothing.

    Args:
        timeout: seconds that a process waits for the others.
    Raises:
        RankError: another process failed, or does not come.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield
        return
    import torch
    import torch.distributed as dist

    from ottava.train.ranks import RankError

    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout), **_meeting_place())
    except RuntimeError as error:
        raise RankError(f"cannot join the other processes: {error}. One of them has failed, or is not there") from error
    try:
        yield
    finally:
        dist.destroy_process_group()


def _meeting_place() -> dict[str, Any]:
    """The arguments by which processes of this start find each other: torchrun's store, if it has one."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {}
    return {"store": _store(300.0), "rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}


def _store(timeout: float) -> Any:
    """This start's part of torchrun's store. In torch 2.13 all restarts share one store, which still holds the
    addresses of dead processes: new processes would wait for them."""
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # torch exports them by name only

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout))
    return PrefixStore(f"ottava, restart {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def print_error(text: str) -> None:
    """Prints an error on stderr. Under torchrun a process stays silent about an error that rank 0 prints, too.

    Rank 0 prints its error and shares it in torchrun's store. Every other process waits for it at most PATIENCE
    seconds. If rank 0 shares no error, or an error that does not contain this one, the process prints its own, with its
    rank.
    """
    rank = int(os.environ.get("RANK", "0")) if int(os.environ.get("WORLD_SIZE", "1")) > 1 else 0
    if rank == 0:
        print(text, file=sys.stderr, flush=True)
        _first_error(text)
    elif text.removeprefix("ottava: ") not in _first_error():
        print(f"[rank{rank}]: {text}", file=sys.stderr, flush=True)


def _first_error(text: str | None = None) -> str:
    """The error of rank 0 in torchrun's store; "" if there is none. With a text: stores it first."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return ""
    # torchrun ends all processes once one has ended: a process that still waits must print its error first
    handler = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        store = _store(PATIENCE)
        if text is not None:
            store.set(_ERROR, text)
        deadline = time.monotonic() + PATIENCE
        while not (stored := store.check([_ERROR])) and time.monotonic() < deadline:
            time.sleep(0.05)  # store.wait would print a warning of torch
        return str(store.get(_ERROR).decode()) if stored else ""
    except (ImportError, KeyError, RuntimeError, ValueError):  # no torch, or the store is gone
        return ""
    finally:
        signal.signal(signal.SIGTERM, handler)
