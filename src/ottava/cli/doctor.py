"""Commands about this machine: `ottava doctor` tests its kernels, `ottava bench` measures them."""

from __future__ import annotations

import json
import math
import platform
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from typer import Argument, Option

from ottava.base.text import columns, progress
from ottava.cli.console import SpeaksOption, answer

if TYPE_CHECKING:
    from ottava.bench.method import Run

WRONG, MISSING = 1, 3
SIZE = 128
"""Rows and columns of the test matrices; every kernel supports this size."""
TOLERANCE = 2.0**-8
"""Twice the largest error of one rounding to BF16; each kernel rounds once. One wrong operand code in a hundred causes
a larger error."""


def doctor(
    language: SpeaksOption = "en",
    as_json: Annotated[bool, Option("--json", help="Print the result as one JSON object.")] = False,
) -> int:
    """Show this machine and the kernels of each recipe on it, and check the results of these kernels.

    Doctor runs every GEMM of every recipe on random numbers. The codes of the operands must equal those of the
    reference, bit by bit, and the result must be the product of the codes.

    The first call builds the native kernels, which takes seconds, and measures which GEMM kernel is the fastest on this
    CPU. OTTAVA_NATIVE=0 switches native kernels off, OTTAVA_CACHE names the folder for kernels and measurements, CXX
    names the compiler.

    Exit code 1 if a recipe computes wrong results, 3 if this machine lacks something that makes ottava faster, such as
    a C++ compiler.
    """
    result = examine()
    answer(as_json, result, report(result), language)
    wrong = any(row["check"] != "ok" for row in result["recipes"])
    return WRONG if wrong else MISSING if result["lost"] else 0


def examine() -> dict[str, Any]:
    """Device, versions, libraries, the checked kernels of every recipe, traps and missing parts, as plain values."""
    import torch

    import ottava
    from ottava.kernels.native import build as native_build
    from ottava.kernels.native import gemm as native_gemm
    from ottava.ops import dispatch

    settings = native_build.from_environment()
    compiler = native_build.find_compiler(settings)
    on_gpu = torch.cuda.is_available()
    libraries = []
    for name in native_build.sources():
        native_build.begin(name)
    for name in native_build.sources():
        built = native_build.load(name)
        libraries.append({"name": name, "reason": built.reason, "note": built.note, "threads": built.threads})
    lost = [f"{library['name']}: {library['reason']}" for library in libraries if library["reason"]]
    lost += sorted({str(library["note"]) for library in libraries if library["note"]})
    if any(not library["reason"] and not library["threads"] for library in libraries):
        lost.append("native kernels run on one thread: the compiler has no OpenMP; install g++, which has it")
    return {
        "ottava": ottava.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if on_gpu else f"cpu, {platform.machine()}",
        "threads": torch.get_num_threads(),
        "compiler": "" if isinstance(compiler, str) else " ".join(compiler),
        "cache": str(settings.cache or ""),
        "libraries": libraries,
        "measured": {
            "levels of native_gemm": str(native_gemm.ranking()),
            "gemm": str(dispatch.cpu_ranking()),
            "gemm of BF16 operands": str(dispatch.dense_ranking()),
        },
        "recipes": [row for recipe in ottava.RECIPES.values() for row in _kernels(recipe, "cuda" if on_gpu else "cpu")],
        "traps": traps(facts()),
        "lost": lost,
    }


@dataclass(frozen=True)
class MachineFacts:
    """The facts of a machine that traps depend on."""

    capability: tuple[int, int] | None
    """Compute capability of the GPU; None without a GPU."""
    cuda: tuple[int, ...]
    """CUDA version that torch was built for."""
    cudnn: int
    """Version of cuDNN: 91500 is 9.15."""
    cudnn_attention: bool
    """Whether torch may use cuDNN's attention."""
    matmul_precision: str
    """The result of torch.get_float32_matmul_precision()."""


def facts() -> MachineFacts:
    """The facts of this machine."""
    import torch

    on_gpu = torch.cuda.is_available()
    return MachineFacts(
        torch.cuda.get_device_capability() if on_gpu else None,
        tuple(int(part) for part in (torch.version.cuda or "0").split(".")),
        (torch.backends.cudnn.version() or 0) if on_gpu else 0,
        torch.backends.cuda.cudnn_sdp_enabled(),
        torch.get_float32_matmul_precision(),
    )


def traps(here: MachineFacts) -> list[str]:
    """Settings that slow FP8 down and that no receipt shows.

    Example:
        >>> [trap.split(":")[0] for trap in traps(MachineFacts((9, 0), (12, 8), 91000, True, "high"))]
        ['float32 inputs', 'attention', 'blocks of 128']
    """
    warnings = [
        "float32 inputs: casts read twice the bytes, and every other operation stays in float32, which can be slower "
        "than BF16 (TransformerEngine #1119). Use model.bfloat16(), or torch.autocast(device_type, torch.bfloat16)"
    ]
    if here.capability is None:
        return warnings
    sm = f"sm_{here.capability[0]}{here.capability[1]}"
    if here.capability < (8, 9):
        warnings.append(
            f"tensor cores: {sm} has none for FP8; BF16 emulates every recipe, and no recipe is faster than BF16"
        )
    if here.capability >= (9, 0) and not (here.cudnn_attention and here.cudnn > 91500):
        why = f"cuDNN {here.cudnn // 10000}.{here.cudnn // 100 % 100}" if here.cudnn_attention else "switched off"
        warnings.append(
            f"attention: torch does not choose cuDNN's ({why}; it does after 9.15), and FlashAttention-2 takes 1.7 to "
            "2.3 times as long on Hopper. Put torch.nn.attention.sdpa_kernel([SDPBackend.CUDNN_ATTENTION, "
            "SDPBackend.FLASH_ATTENTION], set_priority=True) around the forward"
        )
    if here.capability[0] == 9 and here.cuda < (12, 9):
        version = ".".join(map(str, here.cuda))
        warnings.append(
            f"blocks of 128: this torch is built for CUDA {version}; GEMMs of such blocks need 12.9 and run in BF16"
        )
    if here.matmul_precision == "highest":
        warnings.append(
            "float32 GEMMs: precision is 'highest', so float32 layers use no tensor cores; "
            "torch.set_float32_matmul_precision('high') turns tensor cores on"
        )
    return warnings


class Explained(NamedTuple):
    """One quantized GEMM of a recipe on a matrix that fits all kernels, and why each kernel runs or does not."""

    gemm: str
    tensors: tuple[Any, Any]
    operands: tuple[Any, Any]
    casts: tuple[str, str]
    """`explain_quantize` of both."""
    product: str
    """`explain`."""


def explained(recipe: Any, device: str) -> Iterator[Explained]:
    """Each quantized GEMM of a recipe, its operands cast on that device."""
    import torch

    from ottava.ops.gemm import explain
    from ottava.ops.quantize import explain_quantize, quantize

    numbers = torch.Generator().manual_seed(0)
    x, w = (torch.randn(SIZE, SIZE, generator=numbers).to(device, torch.bfloat16) for _ in range(2))
    for name in ("fprop", "dgrad", "wgrad"):
        gemm = getattr(recipe, name)
        if gemm.quantized:
            a = quantize(x, gemm.lhs)
            b = quantize(w, gemm.rhs, beside=a)
            casts = explain_quantize(x, gemm.lhs), explain_quantize(x, gemm.rhs)
            yield Explained(name, (x, w), (a, b), casts, explain(a, b, out_dtype=x.dtype))


def _kernels(recipe: Any, device: str) -> list[dict[str, str]]:
    """One row per quantized GEMM: its kernels, and the check of their result."""
    rows = []
    for one in explained(recipe, device):
        gemm = getattr(recipe, one.gemm)
        row = {"recipe": recipe.name, "gemm": one.gemm, "operands": f"{gemm.lhs} x {gemm.rhs}"}
        row |= {"quantize": ", ".join(dict.fromkeys(map(_runs, one.casts))), "kernel": _runs(one.product)}
        rows.append(row | {"check": _check(gemm, one.tensors, one.operands)})
    return rows


def _check(cells: Any, tensors: Any, operands: Any) -> str:
    """ "ok", or the error in the casts of these tensors or in the product of their codes."""
    import torch

    from ottava.kernels import reference
    from ottava.ops.gemm import gemm, rests

    for side, x, got in zip(("left", "right"), tensors, operands, strict=True):
        if got.spec.rounding == "stochastic" or got.spec.block_scale == "ms_eden":  # draws other codes each time
            continue
        truth = reference.quantize(got.transformed(x).cpu(), got.spec)
        codes = (got.data.cpu().contiguous().view(torch.uint8), truth.data.contiguous().view(torch.uint8))
        if wrong := int((codes[0] != codes[1]).sum()):
            return f"{wrong} of {codes[0].numel()} codes of the {side} operand differ from the reference"
        if not torch.equal(got.scale_inv.cpu(), truth.scale_inv):
            return f"scales of the {side} operand differ from the reference"
    pair: Any = rests(*operands) or operands
    a, b = pair
    y = gemm(a, b, out_dtype=torch.bfloat16, fast_accum=cells.fast_accum).double()
    exact = a.dequantize(torch.float32).double() @ b.dequantize(torch.float32).double().t()
    error = float((y - exact).norm() / exact.norm())
    return (
        "ok"
        if error < TOLERANCE
        else f"the product is off by {error:.2g}, relative; one rounding allows {TOLERANCE:.2g}"
    )


def _runs(explanation: str) -> str:
    """The kernel at the end of an explanation."""
    return next(line.removesuffix(": runs") for line in explanation.splitlines() if line.endswith(": runs"))


def report(result: dict[str, Any]) -> str:
    """The result of `examine` as text."""
    lines = [
        f"ottava {result['ottava']}, torch {result['torch']}, Python {result['python']}",
        f"device    {result['device']}, {result['threads']} threads",
        f"compiler  {result['compiler'] or 'none'}",
        f"cache     {result['cache'] or 'none'}",
    ]
    lines += [f"native    {library['name']}: {library['reason'] or 'built'}" for library in result["libraries"]]
    lines += [f"measured  {what}: {ranking}" for what, ranking in result["measured"].items()]
    header = ("recipe", "gemm", "operands", "quantize", "kernel", "check")
    lines += ["", *columns(header, *([row[key] for key in header] for row in result["recipes"])), ""]
    wrong = [f"  {row['recipe']}.{row['gemm']}: {row['check']}" for row in result["recipes"] if row["check"] != "ok"]
    if wrong:
        lines += ["Wrong results:", *wrong]
        lines.append("Do not train with these recipes on this machine. Please report the output of this command.")
    lines += ["Traps:", *(f"  {line}" for line in result["traps"]), ""]
    if result["lost"]:
        lines += ["Missing:", *(f"  {line}" for line in result["lost"])]
        lines.append("ottava works without it, but casts, GEMMs and statistics on the CPU take several times as long.")
    else:
        lines.append("Nothing is missing.")
    return "\n".join(lines)


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
        Option(
            help="cast, gemm, linear, block, statistics, memory, demo, build or smollm2; repeatable. [all but smollm2]"
        ),
    ] = None,
    rounds: Annotated[int, Option(help="Interleaved rounds of every case.")] = 15,
    compiled: Annotated[
        bool, Option("--compiled", help="Measure under torch.compile, too. This takes minutes.")
    ] = False,
    threads: Annotated[int | None, Option(min=1, help="Threads of torch. [torch's own choice]")] = None,
    cpu_time: Annotated[bool, Option("--cpu-time", help="Measure CPU time: for one thread on a busy machine.")] = False,
    checkpoint: Annotated[
        Path | None, Option(help="smollm2: folder of SmolLM2-135M with model.safetensors. [random weights]")
    ] = None,
    text: Annotated[
        Path | None, Option(help="smollm2: text for the perplexity; needs --checkpoint and tokenizers.")
    ] = None,
    keep_memory: Annotated[
        bool, Option("--keep-memory", help="Let glibc keep freed memory: no page faults over 32 MiB.")
    ] = False,
    as_json: Annotated[bool, Option("--json", help="Print the result as one JSON object.")] = False,
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
    settings = Settings(rounds, compiled, cpu_time, checkpoint, text)
    for case in progress(measure(suite, settings), "measuring", prints=True):
        cases.append(case)
        if not as_json:
            typer.echo(f"\n{case}")
    if as_json:
        facts = machine() | {"keep_memory": keep_memory}
        answer(True, {"machine": facts, "cases": [case.to_dict() for case in cases]}, "")
    return 0


@bench.command("gpu")
def gpu(
    suites: Annotated[
        list[str] | None,
        Argument(help="Some of ceilings, gemm, cast, modules, linear, host, block, seed_layer, train. [all]"),
    ] = None,
    out: Annotated[Path | None, Option("--json", metavar="FILE", help="Write all numbers to this file.")] = None,
    shape: Annotated[
        str | None, Option(metavar="MxKxN", help="One shape for gemm, cast, modules, linear and host. [each its own]")
    ] = None,
    recipe: Annotated[list[str] | None, Option(help="A recipe to measure; repeatable. [those of each suite]")] = None,
    budget: Annotated[
        float | None, Option(metavar="SECONDS", help="Begin nothing new after these seconds. [no limit]")
    ] = None,
    rounds: Annotated[int, Option(help="Interleaved samples of each contender.")] = 50,
    rivals: Annotated[bool, Option(help="Measure torchao, Liger and TransformerEngine, if installed.")] = True,
    compiled: Annotated[bool, Option(help="Measure under torch.compile, too. This takes minutes.")] = True,
    smoke: Annotated[bool, Option("--smoke", help="Tiny shapes on any device; the times mean nothing.")] = False,
) -> int:
    """Time kernels, layers and training on the GPU, and check every result in the same run.

    Each row has a median in microseconds, 10th and 90th percentile, rates, the speed-up over the fastest BF16
    of the same mode, launches, memory of a step. Rows are printed and written to FILE as they come, with device,
    driver, clocks, power, versions and commit. Suites share the seconds of --budget evenly; what has begun still ends.

    Exit code 1 if a contender fails or computes wrong results, 2 for an unknown suite or recipe, or a bad shape,
    3 without a GPU.
    """
    from ottava.bench.gpu import SUITES

    run = _run(smoke, rounds, rivals, compiled)
    if run is None:
        return MISSING
    until = math.inf if budget is None else time.monotonic() + budget
    run = replace(run, shape=_sizes(shape), recipes=tuple(recipe or ()), until=until)
    return _measure(run, suites or list(SUITES), out)


def _sizes(text: str | None) -> tuple[int, ...] | None:
    """16384x4096x14336 -> (16384, 4096, 14336)."""
    if text is None:
        return None
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){2}", text):
        raise ValueError(f"--shape: got {text!r}; needs rows, inputs and outputs, as in 16384x4096x14336")
    return tuple(int(size) for size in text.split("x"))


@bench.command("ceilings")
def ceilings(
    out: Annotated[Path, Argument(metavar="FILE", help="JSON file for the constants.")] = Path("ceilings.json"),
    rounds: Annotated[int, Option(help="Interleaved samples of each contender.")] = 50,
    smoke: Annotated[bool, Option("--smoke", help="Tiny shapes on any device; the times mean nothing.")] = False,
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
    from ottava.bench.gpu import line, where

    report: dict[str, Any] = {"schema_version": 1, **where(run), "suites": {}}
    typer.echo(f"{report['device']}, torch {report['versions']['torch']}, commit {report['commit'] or 'unknown'}")
    for name, reason in report["left_out"].items():
        typer.echo(f"left out: {name}: {reason}")
    failed = 0
    for name, kind, value in progress(measure(run, suites), "measuring", prints=True):
        if name not in report["suites"]:
            typer.echo(f"\n{name}")
        suite = report["suites"].setdefault(name, {"rows": []})
        if kind == "row":
            suite["rows"].append(value)
            failed += "error" in value and not value["error"].startswith("left out")
            typer.echo(line(value))
        else:
            (report if kind == "constants" else suite)[kind] = value
        if out is not None:  # after each row: an interruption loses one row only
            out.write_text(json.dumps(report, indent=1), encoding="utf-8")
    return WRONG if failed else 0
