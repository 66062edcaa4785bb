"""Starts some processes that run scenarios in turn, each a function of the `World` it runs in. Gloo, CPU only."""

from __future__ import annotations

import importlib
import json
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from state_scenarios import World

import warm

_LIMIT = 240


def scenarios_of(*modules: str) -> list[str]:
    """ "module.function" of every function of theirs that takes a world and returns nothing."""
    return [
        f"{name}.{thing.__name__}"
        for name in modules
        for thing in vars(importlib.import_module(name)).values()
        if getattr(thing, "__annotations__", {}).keys() == {"world", "return"} and thing.__module__ == name
    ]


def run_all(rank: int, size: int, folder: str, scenarios: list[str]) -> None:
    """What each process does: all scenarios in turn, until one fails, since the ranks then no longer agree."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/meeting", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=180))
    results: dict[str, str] = {}
    for scenario in scenarios:
        torch.manual_seed(0)
        module, name = scenario.rsplit(".", 1)
        began = time.perf_counter()
        try:
            getattr(importlib.import_module(module), name)(World(rank, size, folder))
            results[scenario] = ""
        except Exception:
            results[scenario] = traceback.format_exc()
        print(f"rank {rank}: {scenario} {time.perf_counter() - began:.1f} s", flush=True)
        Path(folder, f"{rank}.json").write_text(json.dumps(results))
        if results[scenario]:
            break
        dist.barrier()
    store.set(f"left {rank}", "")  # a rank that closes its connections ends the barrier of a slower rank with an error
    store.wait([f"left {other}" for other in range(size)])
    dist.destroy_process_group()


def start(size: int, folder: Path, scenarios: list[str]) -> list[dict[str, str]]:
    """The results of each rank: scenario -> "" or its traceback."""
    folder.mkdir()
    context = warm.start_ranks(run_all, (size, str(folder), scenarios), size)
    deadline = time.monotonic() + _LIMIT
    try:
        while not context.join(timeout=1) and time.monotonic() < deadline:
            pass
    finally:
        for process in context.processes:
            if process.is_alive():
                process.terminate()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]


def failures(results: list[dict[str, str]], scenarios: list[str]) -> list[str]:
    """What went wrong on which rank."""
    return [
        f"{scenario}, rank {rank}: {said}"
        for scenario in scenarios
        for rank, answers in enumerate(results)
        if (said := answers.get(scenario, "was not run: an earlier scenario failed"))
    ]
