"""Proofs about numerics: `ottava check` and `certify`, of two programs and of a kernel; `audit` and `order`.

`check` runs a script in two ways, or reads two saved traces, and names the first tensor that is wrong. `certify` says
whether a kernel of anybody's library computes what its format and recipe say. `audit` recomputes elements of GEMMs in a
running script, and `order` learns how a kernel adds.
"""

from __future__ import annotations

import importlib
import os
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from ottava.base.errors import unknown_name
from ottava.base.text import progress, to_json
from ottava.cli.console import SpeaksOption, answer, spoken
from ottava.cli.watch import run_inside

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ottava.prove.order import Probed
    from ottava.prove.prover import Verdict
    from ottava.prove.recorder import StepRecording
    from ottava.prove.tolerance import Nudge


class ScriptError(RuntimeError):
    """A run of the user's script failed; the message has the last lines that it wrote."""

    exit_code = 5


def check(
    words: Annotated[
        list[str],
        Argument(metavar="SCRIPT [-- ARGUMENTS] | TRACE_A TRACE_B", help="A script, or two saved traces or logs."),
    ],
    ranks: Annotated[int, Option("--ranks", min=1, help="Processes of B, started as torchrun does.")] = 1,
    steps: Annotated[int, Option("--steps", min=1, help="Optimizer steps to compare.")] = 1,
    draws: Annotated[int, Option("--draws", min=0, help="Runs of A with every tensor moved by one rounding.")] = 3,
    save: Annotated[
        Path | None, Option("--save", metavar="FOLDER", help="Save the trace of the script, and compare nothing.")
    ] = None,
    out: Annotated[
        list[Path] | None, Option("--out", "-o", metavar="F", help="Write the result: a page as F.html, else JSON.")
    ] = None,
    reproducer: Annotated[
        Path | None,
        Option("--reproducer", metavar="F.py", help="Write a script of the first wrong operator alone: two more runs."),
    ] = None,
    language: SpeaksOption = "en",
    as_json: Annotated[bool, Option("--json", help="Print the result as one JSON object.")] = False,
    operations: Annotated[bool, Option("--operations", hidden=True)] = False,
    record: Annotated[Path | None, Option("--record", hidden=True)] = None,
    nudge: Annotated[str, Option("--nudge", hidden=True)] = "",
) -> int:
    """Find the first tensor in which two programs differ: a script plain and with arguments, on one rank and on many.

    The script runs plain, and again with the words after -- or on --ranks processes. It ends after --steps steps of
    its optimizer. Plain runs with every tensor moved by one rounding say how far a right program may be. Exit code 1
    if a tensor is beyond its limit.
    """
    if record is not None:
        _record(record, words, steps, nudge, operations)
    from ottava.prove.page import check_page
    from ottava.prove.prover import judge, nudge_for
    from ottava.report.frame import write_page

    runs = _is_script(words[0], reproducer, ranks == 1 and save is None)
    with tempfile.TemporaryDirectory(prefix="ottava-check-") if runs else nullcontext("") as scratch:
        if runs:
            script, arguments = words[0], words[1:]
            if not Path(script).exists():
                raise FileNotFoundError(f"check: there is no file {script!r}; give a Python script")
            folder = Path(scratch) if save is None else save
            if save is None and not arguments and ranks == 1:
                raise ValueError(
                    "check: A and B are the same command; give arguments after --, --ranks, or --save FOLDER"
                )
            first, its_ranks = ([], 1) if save is None else (arguments, ranks)
            wanted = draws if save is None or ranks == 1 else 0
            ahead = progress(range(2 + (save is None) + wanted), "running the script")

            def ran(
                name: str, words: list[str] = first, on: int = its_ranks, nudge: Nudge | None = None
            ) -> StepRecording:
                next(ahead)
                return _run(folder / name, script, words, on, steps, nudge)

            a, a.again = ran("a"), ran("again")
            b = a if save is not None else ran("b", arguments, ranks)
            a.nudged = [ran(f"nudged{n}", on=1, nudge=nudge_for(a, b, n)) for n in range(1, wanted + 1)]
            ahead.close()
            if save is not None:
                facts = {"saved": str(save), "tensors": len(a.entries)}
                answer(as_json, facts, f"Saved {len(a.entries)} tensors to {save}.", language)
                return 0
            a.name, b.name = "A", "B"
            verdict = judge(a, b)
            _reproduce(verdict, folder, (script, [], arguments), steps, reproducer)
        elif len(words) == 2:
            verdict = _saved(words)
        else:
            raise ValueError(f"check: got {' '.join(words)!r}; give SCRIPT.py -- ARGUMENTS, or two saved traces")
    given = [(name, value) for name, value, usual in (("--ranks", ranks, 1), ("--steps", steps, 1)) if value != usual]
    behind = ["--", *words[1:]] if runs and len(words) > 1 else words[1:]
    command = ["ottava", "check", words[0], *(str(word) for pair in given for word in pair), *behind]
    for path in out or ():
        page = check_page(verdict, shlex.join(command)) if path.suffix == ".html" else to_json(verdict.to_dict()) + "\n"
        write_page(path, page, language)
    answer(as_json, verdict.to_dict(), "\n\n".join(map(str, [verdict, *(out or ())])), language)
    return 0 if verdict.same else 1


def _saved(words: Sequence[str]) -> Verdict:
    """The verdict of two traces, or of two logs."""
    from ottava.prove.logs import compare_logs, load_log
    from ottava.prove.prover import judge
    from ottava.prove.traces import load_trace

    logs = [_log_of(Path(word)) for word in words]
    if not any(logs):
        a, b = (load_trace(Path(word)) for word in words)
        a.name, b.name = words
        return judge(a, b)
    if not all(logs):
        raise ValueError(f"check: one of {words[0]} and {words[1]} is a log, the other is none; give two logs")
    one, other = (load_log(log) for log in logs if log is not None)
    return compare_logs(one, other, (words[0], words[1]))


def _log_of(path: Path) -> Path | None:
    """The file of a log of operations; None for a folder with tensors."""
    captured = path / "rank_0_activations.log"
    return captured if captured.is_file() else path if path.is_file() else None


def _run(
    folder: Path, script: str, arguments: Sequence[str], ranks: int, steps: int, nudge: Nudge | None = None, *more: str
) -> StepRecording:
    """Records a script in processes of its own; more: options of the recording."""
    from ottava.prove.recorder import StepRecording

    words = [sys.executable, "-m", "ottava", "check", "--record", str(folder), "--steps", str(steps), *more]
    words += ["--nudge", to_json(asdict(nudge))] if nudge is not None else []
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    processes = []
    for rank in range(ranks):
        own = {**os.environ, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else None
        streams: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        processes.append(subprocess.Popen([*words, script, "--", *arguments], env=own, **streams))
    said = [process.communicate()[1] for process in processes]
    for rank, process in enumerate(processes):
        if process.returncode:
            last = "\n".join(said[rank].strip().splitlines()[-6:])
            command = " ".join([script, *arguments])
            raise ScriptError(f"check: {command}, rank {rank}, ended with code {process.returncode}:\n{last}")
    return StepRecording.load(folder)


class _Enough(BaseException):
    """All steps are recorded: the script need not go on. No handler of errors catches it."""


def _is_script(word: str, reproducer: Path | None, on_one: bool) -> bool:
    """Whether a word names a script; a trace has no operators."""
    runs = word.endswith(".py")
    if reproducer is not None and not (runs and on_one):
        raise ValueError("check: --reproducer needs a script that is compared on one rank; a trace has no operators")
    return runs


def _reproduce(
    verdict: Verdict, folder: Path, words: tuple[str, Sequence[str], Sequence[str]], steps: int, path: Path | None
) -> None:
    """Runs A and B again, with every operator noted, and writes the first one that differs as a script."""
    if path is None or verdict.finding is None:
        return
    import torch

    from ottava.prove.prover import AtenCall, Operations, Ref, write

    noted = []
    for name, arguments in zip(("operators of a", "operators of b"), words[1:], strict=True):
        _run(folder / name, words[0], arguments, 1, steps, None, "--operations")
        noted.append(Operations())
        with torch.serialization.safe_globals([AtenCall, Ref]):
            noted[-1].done, noted[-1].values = torch.load(folder / name / "operators.pt", weights_only=True)
    verdict.reproducer, note = write(verdict.finding.sentence, verdict.finding.limit, noted[0], noted[1], path)
    verdict.notes.append(note)


def _record(folder: Path, words: Sequence[str], steps: int, nudge: str, operations: bool) -> None:
    """What a process of `_run` does: runs the script until the last step, saves, and ends."""
    import torch

    from ottava.base.untrusted import parse_json
    from ottava.prove.prover import Operations
    from ottava.prove.recorder import StepRecorder
    from ottava.prove.tolerance import Nudge
    from ottava.watching.launch import run_script

    def enough() -> None:
        raise _Enough

    facts: dict[str, Any] = parse_json(nudge) if nudge else {}
    noted, begun = Operations() if operations else None, list[int]()

    def first_call(*_: Any) -> None:
        if noted is not None and not begun:  # what a script does before makes the weights, in memory of any content
            begun.append(len(noted.done))

    torch.nn.modules.module.register_module_forward_pre_hook(first_call)
    with StepRecorder(steps=steps, nudge=Nudge(**facts) if facts else None, at_end=enough) as recorder:
        try:
            with noted or nullcontext():
                run_script(list(words))
        except _Enough:
            pass
        except SystemExit as ended:
            if ended.code not in (None, 0):
                raise
        recorder.recording().save(folder)
        if noted is not None:
            # handles of the profiler are no data, and a memory format has no pickle that torch reads back
            done = [
                replace(one, keywords={k: v for k, v in one.keywords.items() if k != "memory_format"})
                for one in noted.done[sum(begun) :]
                if not one.name.startswith("profiler.")
            ]
            torch.save((done, noted.values), folder / "operators.pt")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # process groups and workers of a script that was stopped would wait for each other


def certify(
    names: Annotated[
        list[str] | None, Argument(metavar="MODULE:FUNCTION ...", help="Adapters, or names that --list shows.")
    ] = None,
    kind: Annotated[str | None, Option(help="The kind of the adapters, in place of their own.")] = None,
    recipe: Annotated[str | None, Option(help="A recipe in place of the adapters' own.")] = None,
    format: Annotated[str | None, Option(help="A format in place of the adapters' own.")] = None,
    operand: Annotated[str | None, Option(help="The operand of a cast: x, weight or grad.")] = None,
    out: Annotated[str | None, Option(help="The output type of a GEMM: bfloat16 or float32.")] = None,
    accumulator: Annotated[
        str | None, Option(help="How a GEMM sums: fp32, hopper, ...; named ones bit for bit.")
    ] = None,
    cases: Annotated[int, Option(min=1, help="Cases of each adapter.")] = 100,
    seed: Annotated[int, Option(help="Of the drawn cases.")] = 0,
    device: Annotated[str, Option(help="The device of all tensors.")] = "cpu",
    all_inputs: Annotated[bool, Option("--all", help="Codecs: also all 2^32 FP32 inputs.")] = False,
    list_ready: Annotated[bool, Option("--list", help="Show the ready adapters.")] = False,
    json: Annotated[Path | None, Option(help="Write the certificates to this file, as JSON.")] = None,
    html: Annotated[Path | None, Option(help="Write one page with all certificates.")] = None,
    language: SpeaksOption = "en",
) -> int:
    """Certify kernels: run them on hard cases, and say whether they are exact, within a proved bound, or wrong.

    An adapter is a function that hands your kernel the tensors of a case; docs/certify.md has the signatures. A wrong
    result comes with its first wrong element, and with the fault that gives these numbers.

    Exit code 1 if something is wrong or raises, 2 for an unknown adapter, kind or recipe.
    """
    import torch

    from ottava.prove.certificate import certify as run
    from ottava.prove.page import headline, page
    from ottava.prove.ready import load, ready
    from ottava.report.frame import write_page

    if list_ready:
        typer.echo("\n".join(ready()))
        return 0
    if not names:
        raise ValueError("certify: no adapter; give MODULE:FUNCTION, or a name that `ottava certify --list` shows")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"certify: --device {device}: {error}") from error
    changed = {"recipe": recipe, "format": format, "operand": operand, "out": out, "accumulator": accumulator}
    found = []
    adapters = [load(name, kind, **changed) for name in names]
    for one in adapters:
        found.append(run(one, count=cases, seed=seed, device=device, everything=all_inputs))
        typer.echo(spoken(str(found[-1]), language))
    settings = {"cases": cases, "seed": seed, "device": device}
    if json is not None:
        told = {"schema_version": 1, "written_by": "ottava certify", "sentence": headline(found), **settings}
        told["adapters"] = [one.to_dict() for one in found]
        write_page(json, to_json(told, indent=1) + "\n")
    if html is not None:
        write_page(html, page(found, settings), language)
    return 0 if all(one.good for one in found) else 1


_FOUND = 1


def audit(
    command: Annotated[
        list[str], Argument(metavar="-- SCRIPT [ARGUMENTS]", help="The words after `python`: a file, or -m MODULE.")
    ],
    every: Annotated[int, Option(metavar="N", help="Steps from one audited step to the next.")] = 50,
    elements: Annotated[int, Option(metavar="N", help="Elements of each GEMM.")] = 64,
    accumulator: Annotated[
        str | None, Option(metavar="NAME", help="The profile that this device claims, such as hopper.")
    ] = None,
    out: Annotated[
        Path | None, Option("--out", "-o", metavar="DIR", help="Watch the run, too; findings are its events.")
    ] = None,
    language: SpeaksOption = "en",
    as_json: Annotated[bool, Option("--json", help="Print the result as one JSON object.")] = False,
) -> int:
    """Run a training script, unchanged, and recompute random elements of its GEMMs on the host.

    Example: ottava audit --every 100 -- train.py --lr 1e-3

    The script trains with layers of ottava. Under a named accumulator a differing bit is a wrong kernel, a wrong mode
    or a failing card. Where the accumulator is not known, elements are held against a proved bound instead, and the
    result says so. The first step is audited, then every N-th.

    The exit code is the script's; 1 if an element is wrong.
    """
    from ottava.prove.audit import Audit
    from ottava.watching.launch import check_script

    check_script(command, "audit")
    found = Audit(every=every, elements=elements, accumulator=accumulator)
    with ExitStack() as stack:
        if out is not None:
            from ottava.watching.session import watch

            found.event = stack.enter_context(watch(None, out)).writer.event
        code = run_inside(found, command)
    if as_json:
        said = str(found).rpartition("\n")[2]
        answer(True, {**found.to_dict(), "script_exit_code": code}, said, writer="ottava audit")
    else:
        typer.echo(spoken(f"ottava audit: {found}", language), err=True)
    return code or (_FOUND if found.findings else 0)


def order(
    kernel: Annotated[
        str,
        Argument(
            metavar="KERNEL",
            help="torch.sum, torch.mm, linear, scaled_mm, gemm (ottava's), the name of an accumulator, or "
            "MODULE:FUNCTION, a function (a (M, K), b (N, K)) -> (M, N).",
        ),
    ],
    k: Annotated[int, Option("--terms", "-k", metavar="K", help="Terms of the sum.")] = 64,
    dtype: Annotated[str, Option(help="Of the operands: FP32, BF16, FP16, E4M3 or E5M2.")] = "",
    shape: Annotated[str, Option(metavar="MxN", help="Of the result.")] = "16x16",
    at: Annotated[str, Option(metavar="ROW,COLUMN", help="Which element of the result.")] = "0,0",
    tree: Annotated[bool, Option("--tree", help="Print the whole tree, too.")] = False,
    language: SpeaksOption = "en",
    as_json: Annotated[bool, Option("--json", help="Print the result as one JSON object.")] = False,
) -> int:
    """Learn from a kernel's outputs in which order, how wide and with which rounding it adds.

    Example: ottava order torch.mm -k 256 --dtype BF16

    A sum of random terms along the tree that was found is compared with the kernel's, bit for bit. The exit code is 1
    if the outputs fit no order, or if bits differ.
    """
    import json

    from ottava.prove.order import OrderError, confirm, reveal

    probed, out_dtype = _probed(kernel, k, dtype, _pair("shape", shape, "x"), _pair("at", at, ","))
    found = reveal(probed)
    try:
        equal: float | None = confirm(probed, found, out_dtype=out_dtype)
    except OrderError:
        equal = None  # how an addition rounds is not known
    said = "not every rounding is known" if equal is None else f"{equal:.0%} of random sums have these bits"
    text = f"{found.name}\n{found.probes:,} probes; {said}" + (f"\n{found}" if tree else "")
    answer(as_json, {**json.loads(found.to_json()), "confirmed": equal}, text, language, "ottava order")
    return 0 if equal in (None, 1.0) else _FOUND


def _pair(name: str, text: str, mark: str) -> tuple[int, int]:
    parts = text.split(mark)
    if len(parts) != 2 or not all(part.strip().isdecimal() for part in parts):
        raise ValueError(f"order: --{name} is {text!r}; needs two numbers such as {mark.join(('4', '2'))!r}")
    return int(parts[0]), int(parts[1])


def _probed(kernel: str, k: int, dtype: str, shape: tuple[int, int], at: tuple[int, int]) -> tuple[Probed, torch.dtype]:
    """The sum to probe, and the dtype of its result."""
    import torch

    from ottava.numerics.accumulator import ACCUMULATORS
    from ottava.prove.order import of_gemm, of_sum

    dtypes = {"FP32": torch.float32, "BF16": torch.bfloat16, "FP16": torch.float16}
    dtypes |= {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}
    profiles: dict[str, str | None] = {n: n for n, p in ACCUMULATORS.items() if p.emulated and p.dot == 1}
    on_codes = {name: partial(_gemm, accumulator=profile) for name, profile in (profiles | {"gemm": None}).items()}
    plain: dict[str, Callable[..., Tensor]] = {"torch.mm": lambda a, b: a @ b.T, "linear": torch.nn.functional.linear}
    function = on_codes.get(kernel) or plain.get(kernel)
    if kernel not in ("torch.sum", "scaled_mm") and function is None and ":" not in kernel:
        names = ("torch.sum", *plain, "scaled_mm", *on_codes)
        raise ValueError(f"order: {unknown_name('kernel', kernel, names)}; or give MODULE:FUNCTION")
    fp8 = kernel == "scaled_mm" or kernel in on_codes
    dtype = dtype or ("E4M3" if fp8 else "FP32")
    if dtype not in dtypes or (fp8 and dtype[0] != "E"):
        raise ValueError(f"order: {unknown_name(f'dtype for {kernel}', dtype, [*dtypes][3 if fp8 else 0 :])}")
    given = dtypes[dtype]
    if kernel == "torch.sum":
        return of_sum(torch.sum, k, given), given
    run = function or (_scaled_mm if fp8 else _function(kernel))
    try:
        result = run(torch.ones(shape[0], max(k, 0)).to(given), torch.ones(shape[1], max(k, 0)).to(given))
    except Exception as error:
        raise ValueError(f"order: {kernel} does not multiply {shape[0]} x {k} by {shape[1]} x {k}: {error}") from error
    if not isinstance(result, torch.Tensor) or tuple(result.shape) != shape:
        got = tuple(result.shape) if isinstance(result, torch.Tensor) else type(result).__name__
        raise ValueError(f"order: {kernel} returned {got}; needs a tensor {shape}")
    return of_gemm(run, k, given, shape=shape, at=at), result.dtype


def _function(path: str) -> Callable[..., Tensor]:
    module, _, name = path.partition(":")
    sys.path.insert(0, os.getcwd())
    found: Any = getattr(importlib.import_module(module), name, None)
    if not callable(found):
        raise ValueError(f"order: module {module!r} has no function {name!r}")
    return found  # type: ignore[no-any-return]


def _scaled_mm(a: Tensor, b: Tensor) -> Tensor:
    import torch

    one = torch.ones((), device=a.device)
    return torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.float32)


def _gemm(a: Tensor, b: Tensor, accumulator: str | None) -> Tensor:
    import torch

    from ottava.numerics.formats import E4M3, E5M2
    from ottava.numerics.tensor import QuantizationSpec, QuantizedTensor
    from ottava.ops.gemm import gemm

    spec = QuantizationSpec(E5M2 if a.dtype == torch.float8_e5m2 else E4M3)
    lhs, rhs = (QuantizedTensor(x, torch.ones(1, 1), spec, torch.float32) for x in (a, b))
    return gemm(lhs, rhs, out_dtype=torch.float32, accumulator=accumulator)
