"""`ottava bench`: measurements on this machine, one command a device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

SCHEMA_VERSION = 1

bench = typer.Typer(help="Measure casts, linear layers and a block on this machine, beside BF16 and torchao.")


@bench.callback()
def options() -> None:
    """Measure casts, linear layers and a block on this machine, beside BF16 and torchao."""


@bench.command("cpu")
def cpu(
    suite: Annotated[
        list[str] | None,
        typer.Option(help="cast, linear, block, statistics, demo or smollm2; may be repeated. [all but smollm2]"),
    ] = None,
    rounds: Annotated[int, typer.Option(help="Interleaved rounds of every case.")] = 15,
    compiled: Annotated[bool, typer.Option("--compiled", help="Also under torch.compile: minutes.")] = False,
    threads: Annotated[int | None, typer.Option(help="Threads of torch. [torch's own choice]")] = None,
    cpu_time: Annotated[
        bool, typer.Option("--cpu-time", help="Count CPU time: for a busy machine, one thread.")
    ] = False,
    checkpoint: Annotated[
        Path | None, typer.Option(help="smollm2: folder of SmolLM2-135M with model.safetensors. [random weights]")
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="smollm2: text for the perplexity; needs --checkpoint and tokenizers.")
    ] = None,
    keep_memory: Annotated[
        bool, typer.Option("--keep-memory", help="Let glibc keep freed memory: no page faults over 32 MiB.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> int:
    """Time casts, linear layers and models on the CPU, and measure what they keep for backward.

    Every round runs every variant once; ratios are within a round, with the quartiles of all rounds, so that other load
    on the machine hits all alike. Exit code 2 for an unknown suite, or text without a checkpoint.
    """
    import torch

    from ottava.bench.cpu import Settings, machine
    from ottava.bench.cpu import bench as measure
    from ottava.kernels.memory import keep_freed_memory

    if text is not None and checkpoint is None:
        raise ValueError("--text: perplexity needs the weights of --checkpoint; random ones know no text")
    if keep_memory and not keep_freed_memory():
        raise ValueError("--keep-memory: needs glibc, which is not this machine's C library")
    if threads is not None:
        torch.set_num_threads(threads)
    cases = []
    if not as_json:
        typer.echo(json.dumps(machine()))
    for case in measure(suite, Settings(rounds, compiled, cpu_time, checkpoint, text)):
        cases.append(case)
        if not as_json:
            typer.echo(f"\n{case}")
    if as_json:
        said = machine() | {"keep_memory": keep_memory}
        result = {"schema_version": SCHEMA_VERSION, "machine": said, "cases": [case.to_dict() for case in cases]}
        typer.echo(json.dumps(result, allow_nan=False))
    return 0
