"""`ottava bench`: measures this machine, one command per device, and the constants of the planner.

The programs are in `ottava.bench`, which a checkout has and the wheel leaves out.
"""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ottava.base.text import to_json

if TYPE_CHECKING:
    from ottava.bench.method import Run

SCHEMA_VERSION = 1
MISSING = 3

bench = typer.Typer(
    help="Measure casts, layers and training on this machine, beside BF16 and other packages.", rich_markup_mode=None
)


@bench.callback()
def options() -> None:
    """Measure casts, layers and training on this machine, beside BF16 and other packages."""
    if find_spec("ottava.bench") is None:
        raise ImportError(
            "bench: its programs are in the source tree and not in the wheel; clone ottava, and run ./x bench there"
        )


@bench.command("cpu")
def cpu(
    suite: Annotated[
        list[str] | None,
        typer.Option(
            help="cast, gemm, linear, block, statistics, memory, demo, build or smollm2; repeatable. [all but smollm2]"
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(help="Interleaved rounds of every case.")] = 15,
    compiled: Annotated[
        bool, typer.Option("--compiled", help="Measure under torch.compile, too. This takes minutes.")
    ] = False,
    threads: Annotated[int | None, typer.Option(help="Threads of torch. [torch's own choice]")] = None,
    cpu_time: Annotated[
        bool, typer.Option("--cpu-time", help="Measure CPU time: for one thread on a busy machine.")
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
    """Time casts, linear layers and models on the CPU, and measure the memory that they save for backward.

    Every round runs every variant once, so other load on the machine slows all variants alike. A ratio compares two
    times of the same round; quartiles are taken over all rounds. Exit code 2 for an unknown suite, or text without a
    checkpoint.
    """
    import torch

    from ottava.bench.cpu import Settings, machine
    from ottava.bench.cpu import bench as measure
    from ottava.kernels.memory import keep_freed_memory

    if text is not None and checkpoint is None:
        raise ValueError("--text: perplexity needs trained weights; give them with --checkpoint")
    if keep_memory and not keep_freed_memory():
        raise ValueError("--keep-memory: needs glibc; this machine has another C library")
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
        facts = machine() | {"keep_memory": keep_memory}
        result = {"schema_version": SCHEMA_VERSION, "machine": facts, "cases": [case.to_dict() for case in cases]}
        typer.echo(to_json(result))
    return 0


@bench.command("gpu")
def gpu(
    suites: Annotated[
        list[str] | None,
        typer.Argument(help="Some of ceilings, gemm, cast, linear, host, block, seed_layer, train. [all]"),
    ] = None,
    out: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all numbers to this file.")] = None,
    rounds: Annotated[int, typer.Option(help="Interleaved samples of each contender.")] = 50,
    rivals: Annotated[bool, typer.Option(help="Measure torchao, Liger and TransformerEngine, if installed.")] = True,
    compiled: Annotated[bool, typer.Option(help="Measure under torch.compile, too. This takes minutes.")] = True,
    smoke: Annotated[bool, typer.Option("--smoke", help="Tiny shapes on any device; the times mean nothing.")] = False,
) -> int:
    """Time kernels, layers and training on the GPU, and check every result in the same run.

    Each suite prints a table: median microseconds, 10th and 90th percentile, rates, the speed-up over the fastest BF16
    of the same mode, launches, memory of a step. After each suite it writes FILE, with device, driver,
    clocks, power, versions and commit.

    Exit code 1 if a contender computes wrong results, 2 for an unknown suite, 3 without a GPU.
    """
    from ottava.bench.gpu import SUITES

    run = _run(smoke, rounds, rivals, compiled)
    return MISSING if run is None else _measure(run, suites or list(SUITES), out)


@bench.command("ceilings")
def ceilings(
    out: Annotated[Path, typer.Argument(metavar="FILE", help="JSON file for the constants.")] = Path("ceilings.json"),
    rounds: Annotated[int, typer.Option(help="Interleaved samples of each contender.")] = 50,
    smoke: Annotated[bool, typer.Option("--smoke", help="Tiny shapes on any device; the times mean nothing.")] = False,
) -> int:
    """Measure the peak rates of this GPU for `ottava plan --device FILE`, in two minutes.

    Exit code 1 if a GEMM computes wrong results, 3 without a GPU.
    """
    run = _run(smoke, rounds, False, False)
    return MISSING if run is None else _measure(run, ["ceilings"], out)


def _run(smoke: bool, rounds: int, rivals: bool, compiled: bool) -> Run | None:
    """The settings of a measurement. None without a GPU, after a line on stderr."""
    import torch

    from ottava.bench.method import Run

    if not torch.cuda.is_available() and not smoke:
        print("bench: no CUDA device, nothing to measure; --smoke checks this program on a CPU", file=sys.stderr)
        return None
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return Run(device, smoke, 3 if smoke else rounds, rivals, compiled and not smoke)


def _measure(run: Run, suites: list[str], out: Path | None) -> int:
    from ottava.bench.gpu import bench as measure
    from ottava.bench.gpu import table, where

    report: dict[str, Any] = {"schema_version": SCHEMA_VERSION, **where(run), "suites": {}}
    typer.echo(f"{report['device']}, torch {report['versions']['torch']}, commit {report['commit'] or 'unknown'}")
    for name, reason in report["left_out"].items():
        typer.echo(f"left out: {name}: {reason}")
    for name, result in measure(run, suites):
        report["suites"][name] = result
        report |= {"constants": result["constants"]} if "constants" in result else {}
        typer.echo(f"\n{name}\n{table(result['rows'])}")
        if out is not None:  # after each suite: an interruption loses one suite only
            out.write_text(json.dumps(report, indent=1), encoding="utf-8")
    return 0
