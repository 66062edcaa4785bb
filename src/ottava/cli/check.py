"""`ottava check`: runs a script in two ways, or reads two saved traces, and names the first tensor that is wrong."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from ottava.base.text import progress, to_json
from ottava.cli.console import SpeaksOption, answer

if TYPE_CHECKING:
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
    language: SpeaksOption = "en",
    as_json: Annotated[bool, Option("--json", help="Print the result as one JSON object.")] = False,
    record: Annotated[Path | None, Option("--record", hidden=True)] = None,
    nudge: Annotated[str, Option("--nudge", hidden=True)] = "",
) -> int:
    """Find the first tensor in which two programs differ: a script plain and with arguments, on one rank and on many.

    The script runs plain, and again with the words after -- or on --ranks processes. It ends after --steps steps of
    its optimizer. Plain runs with every tensor moved by one rounding say how far a right program may be. Exit code 1
    if a tensor is beyond its limit.
    """
    if record is not None:
        _record(record, words, steps, nudge)
    from ottava.prove.page import check_page
    from ottava.prove.prover import judge, nudge_for
    from ottava.report.frame import write_page

    runs = words[0].endswith(".py")
    with tempfile.TemporaryDirectory(prefix="ottava-check-") if runs else nullcontext("") as scratch:
        if runs:
            script, arguments = words[0], words[1:]
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
                count = len(a.entries)
                answer(as_json, {"saved": str(save), "tensors": count}, f"Saved {count} tensors to {save}.")
                return 0
            a.name, b.name = "A", "B"
            verdict = judge(a, b)
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
    answer(as_json, verdict.to_dict(), "\n\n".join(map(str, [verdict, *(out or ())])))
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
    folder: Path, script: str, arguments: Sequence[str], ranks: int, steps: int, nudge: Nudge | None = None
) -> StepRecording:
    """Records a script in processes of its own."""
    from ottava.prove.recorder import StepRecording

    if not Path(script).exists():
        raise FileNotFoundError(f"check: there is no file {script!r}; give a Python script")
    words = [sys.executable, "-m", "ottava", "check", "--record", str(folder), "--steps", str(steps)]
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


def _record(folder: Path, words: Sequence[str], steps: int, nudge: str) -> None:
    """What a process of `_run` does: runs the script until the last step, saves, and ends."""
    from ottava.base.untrusted import parse_json
    from ottava.prove.recorder import StepRecorder
    from ottava.prove.tolerance import Nudge
    from ottava.watching.launch import run_script

    def enough() -> None:
        raise _Enough

    facts: dict[str, Any] = parse_json(nudge) if nudge else {}
    with StepRecorder(steps=steps, nudge=Nudge(**facts) if facts else None, at_end=enough) as recorder:
        try:
            run_script(list(words))
        except _Enough:
            pass
        except SystemExit as ended:
            if ended.code not in (None, 0):
                raise
        recorder.recording().save(folder)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # process groups and workers of a script that was stopped would wait for each other
