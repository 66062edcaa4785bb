"""Bits over threads, processes and restarts: the table of docs/determinism.md."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import determinism_cases
from determinism_cases import MAY, SAME, cases

import ottava
import warm
from ottava.ops import dispatch
from ottava.recipe import RECIPES

HEADER = ("operation", "1 and 2 threads", "two processes", "after a restart", "its bits depend on", "path, price")


def digests(threads: int) -> dict[str, str]:
    """Of a process of its own."""
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    variables = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": path}
    ran = warm.run([determinism_cases.__file__, str(threads)], env=variables)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


def test_bits_over_threads_processes_and_restarts(table: Callable[..., None]) -> None:
    """What the page promises to be the same is; torch's large sums show that the comparison can see a difference."""
    one, again, two, two_again = (digests(threads) for threads in (1, 1, 2, 2))
    failed = {name: said for name, said in one.items() if "Error" in said}
    assert not failed
    assert (one, two) == (again, two_again)  # a process changes nothing
    assert one["control"] != two["control"]
    promised = {name: case.threads for name, case in cases().items()}
    broken = [name for name, said in promised.items() if said == SAME and one[name] != two[name]]
    assert not broken
    rows = [
        (name, case.threads, SAME, SAME if case.restarts else "no state", case.depends, case.path)
        for name, case in cases().items()
    ]
    table("determinism", HEADER, rows, page="determinism.md")


def test_every_class_of_operations_has_a_row() -> None:
    names = " ".join(cases())
    wanted = [*RECIPES, *ottava.optim.__all__, *(kernel.NAME for kernel in dispatch.CPU_KERNELS)]
    missing = [name for name in wanted if name not in names and name not in ("accumulate_fp32", "rewarm")]
    assert not missing
    assert {case.threads for case in cases().values()} == {SAME, MAY}
