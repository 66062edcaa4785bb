"""`ottava bench`: measurements on this machine, one command a device."""

from __future__ import annotations

import json
from typing import Annotated

import typer

SCHEMA_VERSION = 1

bench = typer.Typer(help="Measure casts, linear layers and a block on this machine, beside BF16 and torchao.")


@bench.callback()
def options() -> None:
    """Measure casts, linear layers and a block on this machine, beside BF16 and torchao."""


@bench.command("cpu")
def cpu(
    suite: Annotated[list[str] | None, typer.Option(help="cast, linear or block; may be repeated. [all]")] = None,
    rounds: Annotated[int, typer.Option(help="Interleaved rounds of every case.")] = 15,
    compiled: Annotated[bool, typer.Option("--compiled", help="Also torchao under torch.compile: minutes.")] = False,
    threads: Annotated[int | None, typer.Option(help="Threads of torch. [torch's own choice]")] = None,
    cpu_time: Annotated[
        bool, typer.Option("--cpu-time", help="Count CPU time: for a busy machine, one thread.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> int:
    """Time casts, linear layers and a transformer block on the CPU.

    Every round runs every variant once; ratios are within a round, with the quartiles of all rounds, so that other load
    on the machine hits all alike. Exit code 2 for an unknown suite.
    """
    import torch

    from ottava.bench.cpu import SUITES, machine
    from ottava.bench.cpu import bench as measure

    if threads is not None:
        torch.set_num_threads(threads)
    cases = []
    if not as_json:
        typer.echo(json.dumps(machine()))
    for case in measure(suite or SUITES, rounds=rounds, compiled=compiled, cpu_time=cpu_time):
        cases.append(case)
        if not as_json:
            typer.echo(f"\n{case}")
    if as_json:
        result = {"schema_version": SCHEMA_VERSION, "machine": machine(), "cases": [case.to_dict() for case in cases]}
        typer.echo(json.dumps(result, allow_nan=False))
    return 0
