"""Errors of a run with several processes: one failed, is gone, or waits in another collective than the others.

torch's error of a failed collective names only an address. So each process writes a note of its place into the run's
store, reads the notes of the others, and names the rank, the layer and the difference.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ottava.train.ranks import RankError, Ranks

PATIENCE = 10.0
"""Seconds that a failed process waits for the notes of the others."""
_WIRE = ("gloo", "nccl", "connection", "timed out", "timeout", "socket", "tcpstore", "broken pipe")


@contextmanager
def explained(ranks: Ranks, model: nn.Module, moment: Callable[[], str]) -> Iterator[None]:
    """Explains an error in the block by the notes of all processes.

    Args:
        moment: returns the time for the message, such as "step 7".
    Raises:
        RankError: a collective failed. The message names the rank that failed, is silent, or waited elsewhere.
    """
    try:
        yield
    except Exception as error:
        if ranks.size == 1 or isinstance(error, RankError):
            raise
        is_local = not (isinstance(error, dist.DistError) or any(word in str(error).lower() for word in _WIRE))
        note = {"place": f"{moment()}, {_place(error.__traceback__, model)}"}
        note |= {"failed": f"{type(error).__name__}: {_first_line(error)}"} if is_local else {}
        notes = _exchange(ranks, note)
        if is_local:
            raise
        raise RankError(f"{_story(ranks.rank, notes)}. torch says: {_first_line(error)}") from error


def _exchange(ranks: Ranks, note: dict[str, str]) -> list[dict[str, str] | None]:
    """Writes this process's note and reads those of the others; None for a silent process."""
    notes: list[dict[str, str] | None] = [None] * ranks.size
    notes[ranks.rank] = note
    deadline = time.monotonic() + PATIENCE
    try:
        store = dist.distributed_c10d._get_default_store()
        store.set(f"ottava/fault/{ranks.run}/{ranks.rank}", json.dumps(note))
        for rank in range(ranks.size):
            seconds = max(0.1, deadline - time.monotonic())
            try:
                store.wait([f"ottava/fault/{ranks.run}/{rank}"], timedelta(seconds=seconds))
                notes[rank] = json.loads(store.get(f"ottava/fault/{ranks.run}/{rank}"))
            except RuntimeError:
                continue
    except RuntimeError:  # the process that held the store is gone
        pass
    return notes


def _story(reader: int, notes: list[dict[str, str] | None]) -> str:
    """The failure in one sentence, for the process of rank `reader`."""
    here = notes[reader]
    assert here is not None
    others = [(rank, note) for rank, note in enumerate(notes) if rank != reader]
    if failed := [
        f"rank {rank} failed ({note['place']}): {note['failed']}" for rank, note in others if note and "failed" in note
    ]:
        return f"{failed[0]}; rank {reader} waited for it ({here['place']})"
    if silent := [str(rank) for rank, note in others if note is None]:
        gone = f"rank {silent[0]}" if len(silent) == 1 else f"ranks {', '.join(silent)}"
        return f"{gone} did not answer: killed, or busy elsewhere; rank {reader} waited ({here['place']})"
    if apart := [(rank, note) for rank, note in others if note and note["place"] != here["place"]]:
        rank, note = apart[0]
        return (
            f"rank {reader} waited ({here['place']}), and rank {rank} did not come: it waited elsewhere "
            f"({note['place']}). All processes must run the same layers in the same order"
        )
    place = here["place"]
    return f"all processes waited at the same place ({place}): the network failed, or parallel.timeout is too short"


def _place(trace: TracebackType | None, model: nn.Module) -> str:
    """The phase, the layer and the collective of an error, from its traceback."""
    names: dict[int, str] = {id(module): name for name, module in model.named_modules()}
    names |= {id(module.quantizers): name for name, module in model.named_modules() if hasattr(module, "quantizers")}
    layer, collective, phase = "", "", "forward"
    while trace is not None:
        frame, trace = trace.tb_frame, trace.tb_next
        values = [frame.f_locals.get(name) for name in ("self", "module", "layer", "call")]
        for value in values:
            module_name = names.get(id(value)) or names.get(id(getattr(value, "doors", None)))
            layer = module_name or getattr(value, "_module_fqn", None) or layer
        if frame.f_code.co_name in ("backward", "_engine_run_backward"):
            phase = "backward"
        if frame.f_code.co_filename.endswith("distributed_c10d.py") and not collective:
            name = frame.f_code.co_name
            collective = "" if name == "wrapper" else name
    where = f"{phase} of {layer}" if layer else phase if phase == "backward" else "outside of layers"
    return f"{where}, in {collective}" if collective else where


def explain_divergence(ranks: Ranks, model: nn.Module, run: Callable[[], Any]) -> str:
    """Names the first module with an output that is not finite, for each process that has one.

    Args:
        run: repeats the forward.
    """
    names = ranks.tell(first_not_finite(model, run))
    lines = [
        f"rank {rank}: the output of {name} is the first that is not finite" for rank, name in enumerate(names) if name
    ]
    return "; ".join(lines) or "all outputs are finite, but a gradient is not"


def first_not_finite(model: nn.Module, run: Callable[[], Any]) -> str:
    """The name of the first module whose output is not finite in `run`; "" if there is none."""
    names: list[str] = []

    def look(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if not names and isinstance(output, Tensor) and not bool(output.isfinite().all()):
                names.append(name)

        return hook

    handles = [module.register_forward_hook(look(name)) for name, module in model.named_modules() if name]
    try:
        with torch.no_grad():
            run()
    finally:
        for handle in handles:
            handle.remove()
    return names[0] if names else ""


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0]
