"""Starts some processes that run scenarios in turn, each a function of the `World` it runs in. Gloo, CPU only."""

from __future__ import annotations

import importlib
import json
import time
import traceback
from pathlib import Path

import torch
from state_scenarios import World

import warm

_LIMIT = 800
"""Seconds: a hang ends. A machine at load ten takes fifteen times as long as a quiet one, and no test depends on it."""


def scenarios_of(*modules: str) -> list[str]:
    """ "module.function" of every function of theirs that takes a world and returns nothing."""
    return [
        f"{name}.{thing.__name__}"
        for name in modules
        for thing in vars(importlib.import_module(name)).values()
        if getattr(thing, "__annotations__", {}) == {"world": "World", "return": "None"} and thing.__module__ == name
    ]


def run_all(rank: int, size: int, folder: str, scenarios: list[str]) -> None:
    """What each process does: all scenarios in turn, until one fails, since the ranks then no longer agree."""
    torch.set_num_threads(1)
    warm.look_for_garbage_rarely()
    world = World(rank, size, folder)
    results: dict[str, str] = {}
    for scenario in scenarios:
        world.meet()
        torch.manual_seed(0)
        module, name = scenario.rsplit(".", 1)
        began = time.process_time()
        try:
            getattr(importlib.import_module(module), name)(world)
            results[scenario] = ""
        except Exception:
            results[scenario] = traceback.format_exc()
        print(f"rank {rank}: {scenario} {time.process_time() - began:.1f} s of CPU time", flush=True)
        Path(folder, "new").mkdir(exist_ok=True)
        Path(folder, "new", f"{rank}.json").write_text(json.dumps(results))
        Path(folder, "new", f"{rank}.json").replace(Path(folder, f"{rank}.json"))
        if results[scenario]:
            break
    world.leave()


def start(size: int, folder: Path, scenarios: list[str]) -> list[dict[str, str]]:
    """The results of each rank: scenario -> "" or its traceback."""
    folder.mkdir()
    context = warm.start_ranks(run_all, (size, str(folder), scenarios), size)
    deadline = time.monotonic() + _LIMIT
    try:
        while not context.join(timeout=1) and time.monotonic() < deadline:
            if any(any(answers.values()) for answers in written(size, folder)):
                deadline = min(deadline, time.monotonic() + 30)  # the others may wait for the one that failed
    finally:
        for process in context.processes:
            if process.is_alive():
                process.terminate()
    return written(size, folder)


def written(size: int, folder: Path) -> list[dict[str, str]]:
    """What each rank has said until now."""
    return [json.loads(path.read_text()) if (path := folder / f"{rank}.json").exists() else {} for rank in range(size)]


def all_hold(size: int, folder: Path, scenarios: list[str]) -> None:
    """Every scenario holds on every rank."""
    failed = failures(start(size, folder / "ranks", scenarios), scenarios)
    assert not failed, "\n".join(failed)


def failures(results: list[dict[str, str]], scenarios: list[str]) -> list[str]:
    """What went wrong on which rank."""
    return [
        f"{scenario}, rank {rank}: {said}"
        for scenario in scenarios
        for rank, answers in enumerate(results)
        if (said := answers.get(scenario, "was not run: an earlier scenario failed"))
    ]
