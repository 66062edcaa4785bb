"""Measures how strong the tests are: changes one operator or number of a room at a time, and counts who notices.

    ./x mutate ROOM [--sample N] [--jobs N]        ROOM: one of `rooms.toml`, or all

Cosmic Ray makes the mutants (`OPERATORS`). Each runs in a process of its own on a copy of the source, with the tests
that `rooms.toml` names for the room, except the slow ones; the fastest test first, until the first one fails. A mutant
that no test notices has survived; it is printed as the line that it changed. `rooms.toml` also lists mutants that
cannot be noticed, each with the reason; nothing else is left out. Exit code 1 says that fewer than 90 % were killed.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import importlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ROOMS: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("rooms.toml").read_text(encoding="utf-8"))
GOAL = 0.9
SEED = 20

OPERATORS = (
    *("Add_Sub", "Sub_Add", "Mul_Div", "Div_Mul", "FloorDiv_Div", "Mod_Mul", "Pow_Mul"),
    *("LShift_RShift", "RShift_LShift", "BitOr_BitAnd", "BitAnd_BitOr", "BitXor_BitAnd"),
    *("Lt_LtE", "LtE_Lt", "Gt_GtE", "GtE_Gt", "Eq_NotEq", "NotEq_Eq", "Is_IsNot", "IsNot_Is"),
    *("USub_UAdd", "Delete_USub", "Delete_Invert", "Delete_Not"),
    *("AddNot", "ReplaceTrueWithFalse", "ReplaceFalseWithTrue", "ReplaceAndWithOr", "ReplaceOrWithAnd"),
    *("ReplaceBreakWithContinue", "ReplaceContinueWithBreak", "ExceptionReplacer", "NumberReplacer"),
    *("RemoveDecorator", "ZeroIterationForLoop"),
)
"""Cosmic Ray's operators by the end of their name. Of the eleven other operators that it would put in the place of one,
and the seven other comparisons, the nearest is taken: the rest are noticed more easily and would flatter the figure."""


PRELOADED = ("triton_mode", "torch._dynamo", "torch.testing", "pytest", "hypothesis", "gfloat", "ml_dtypes", "triton")
PRELOADED += (
    "torchao.float8",
    "torchao.prototype.mx_formats.mx_tensor",
    "numpy",
    "pydantic",
    "yaml",
    "pyarrow.parquet",
)
"""What every mutant's process needs and no mutant changes; `triton_mode` first, which says how Triton runs."""


@dataclass
class Mutant:
    """One changed source."""

    source: str
    line: int
    before: str
    after: str
    killer: str = ""
    """The test that noticed; empty: nobody did."""


@dataclass
class Room:
    """A module, the tests that speak to it, and how long each of them takes unmutated."""

    name: str
    tests: Sequence[str]
    equivalent: Sequence[dict[str, str]]
    seconds: dict[str, float] = field(default_factory=dict)
    limit: float = 600.0
    """Seconds until a mutant counts as noticed because its tests do not end."""

    @property
    def path(self) -> Path:
        return ROOT / "src" / "ottava" / f"{self.name}.py"


# --- mutants ---------------------------------------------------------------------------------------------------------


def meaning(source: str) -> str:
    """The tree of a source without what never runs: annotations under `from __future__ import annotations`."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
        elif isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(None)
    return ast.dump(tree)


def mutants(source: str) -> Iterator[Mutant]:
    """Every mutant of a source, in the order of its lines; one that only changes an annotation is none."""
    from cosmic_ray import mutating, plugins
    from cosmic_ray.ast import ast_nodes, get_ast

    original, found = meaning(source), []
    for name in plugins.operator_names():
        if not name.endswith(OPERATORS):
            continue
        operator = plugins.get_operator(name)()
        count = sum(1 for node in ast_nodes(get_ast(source)) for _ in operator.mutation_positions(node))
        for occurrence in range(count):
            changed = mutating.mutate_code(source, operator, occurrence)
            with contextlib.suppress(SyntaxError):  # `**` of a call is taken for a power
                if changed is not None and meaning(changed) != original:
                    found.append(mutant_of(source, changed))
    yield from sorted(found, key=lambda mutant: (mutant.line, mutant.after))


def mutant_of(source: str, changed: str) -> Mutant:
    """A changed source with the lines that tell it from the original."""
    lines, others = source.splitlines(), changed.splitlines()
    blocks = difflib.SequenceMatcher(None, lines, others, autojunk=False).get_opcodes()
    _, first, end, begin, last = next(block for block in blocks if block[0] != "equal")
    before, after = (" ".join(part.split()) for part in ("\n".join(lines[first:end]), "\n".join(others[begin:last])))
    return Mutant(changed, first + 1, before, after)


def without_equivalent(room: Room, found: list[Mutant]) -> list[Mutant]:
    """The mutants that can be noticed; an entry of `rooms.toml` that names none of them is an error."""
    listed = {(entry["before"], entry["after"]) for entry in room.equivalent}
    unknown = listed - {(mutant.before, mutant.after) for mutant in found}
    if unknown:
        lines = "\n".join(f"    {before}\n    {after}" for before, after in sorted(unknown))
        sys.exit(f"rooms.toml lists equivalent mutants of {room.name} that do not exist (any more):\n{lines}")
    return [mutant for mutant in found if (mutant.before, mutant.after) not in listed]


# --- runs ------------------------------------------------------------------------------------------------------------


class Order:
    """A plugin of pytest: runs the fastest test first, and tells who failed."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self.known, self.seconds, self.failed = seconds, {}, ""  # type: ignore[var-annotated]

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items.sort(key=lambda item: self.known.get(item.nodeid, 0.0))

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed and not self.failed:
            self.failed = report.nodeid

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed and not self.failed:
            self.failed = f"{report.nodeid} (import)"


def preload() -> None:
    """Import once what every mutant's process needs and no mutant changes: the processes are forks of this one."""
    sys.path.insert(0, str(ROOT / "tests"))
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    sys.modules["torch"].set_num_threads(1)


def start(room: Room, source: str, copy: Path, report: Path, warm: bool) -> int:
    """Fork a process that tests one source, in a copy of the package that no other process uses; its id."""
    process = os.fork()
    if process:
        return process
    os.setpgid(0, 0)
    code = 3
    try:
        log = os.open(report.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        (copy / "ottava" / f"{room.name}.py").write_text(source, encoding="utf-8")
        sys.path.insert(0, str(copy))
        os.environ["PYTHONPATH"] = os.pathsep.join([str(copy), os.environ.get("PYTHONPATH", "")])
        sys.dont_write_bytecode = not warm  # a file written twice in a second may keep the bytecode of the first
        os.environ["PYTHONDONTWRITEBYTECODE"] = "" if warm else "1"
        os.chdir(ROOT)
        import pytest

        order = Order(room.seconds)
        words = ["-x", "--no-header", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=short", "--under", "10"]
        code = int(pytest.main([*words, *room.tests], plugins=[order]))
        lines = [order.failed, *(f"{seconds:.4f} {test}" for test, seconds in order.seconds.items())]
        report.write_text("\n".join(lines), encoding="utf-8")
    except BaseException as error:
        report.write_text(f"{type(error).__name__}: {error}", encoding="utf-8")
    os._exit(code)


class Runner:
    """Runs sources, as many at a time as there are copies of the package."""

    def __init__(self, folder: Path, jobs: int) -> None:
        self.folder = folder
        self.free = [folder / f"copy{index}" for index in range(jobs)]
        self.running: dict[int, tuple[Mutant, Path, float, Room]] = {}
        ignored = shutil.ignore_patterns("__pycache__")
        for copy in self.free:
            shutil.copytree(ROOT / "src" / "ottava", copy / "ottava", ignore=ignored)

    def baseline(self, room: Room) -> None:
        """Run the unmutated source in every copy: it must pass, it tells each test's time, it writes the bytecode."""
        source = room.path.read_text(encoding="utf-8")
        begin = time.monotonic()
        for copy in self.free:
            self.launch(room, Mutant(source, 0, "", ""), copy, warm=True)
        passed = [self.wait() for _ in self.free]
        for copy in self.free:
            changed = copy / "ottava" / f"{room.name}.py"
            for stale in (changed.parent / "__pycache__").glob(f"{changed.stem}.*"):
                stale.unlink()
        if any(mutant.killer for mutant in passed):
            sys.exit(f"{room.name}: its tests fail without a mutant: {[mutant.killer for mutant in passed]}")
        for line in (self.free[0] / "report").read_text(encoding="utf-8").splitlines()[1:]:
            seconds, test = line.split(" ", 1)
            room.seconds[test] = float(seconds)
        room.limit = 4 * (time.monotonic() - begin) + 60

    def launch(self, room: Room, mutant: Mutant, copy: Path, warm: bool = False) -> None:
        (copy / "report").unlink(missing_ok=True)
        process = start(room, mutant.source, copy, copy / "report", warm)
        self.running[process] = (mutant, copy, time.monotonic() + room.limit, room)

    def wait(self) -> Mutant:
        """The next mutant whose tests have ended, or had to be."""
        while True:
            for process, (mutant, copy, deadline, room) in list(self.running.items()):
                ended, status = os.waitpid(process, os.WNOHANG)
                if not ended and time.monotonic() < deadline:
                    continue
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process, signal.SIGKILL)  # also what its tests had started
                if not ended:
                    os.waitpid(process, 0)
                    mutant.killer = f"no end after {room.limit:.0f} s"
                elif os.waitstatus_to_exitcode(status) != 0:
                    report = copy / "report"
                    mutant.killer = report.read_text(encoding="utf-8").split("\n")[0] if report.exists() else ""
                    mutant.killer = mutant.killer or f"exit code {os.waitstatus_to_exitcode(status)}"
                del self.running[process]
                (copy / "ottava" / f"{room.name}.py").write_text(room.path.read_text(encoding="utf-8"))
                return mutant
            time.sleep(0.02)

    def run(self, room: Room, found: Sequence[Mutant]) -> None:
        """Find the killer of each."""
        waiting, copies = list(reversed(found)), dict.fromkeys(self.free)
        while waiting or self.running:
            used = {copy for _, copy, _, _ in self.running.values()}
            for copy in [copy for copy in copies if copy not in used][: len(waiting)]:
                self.launch(room, waiting.pop(), copy)
            mutant = self.wait()
            left = len(waiting) + len(self.running)
            if sys.stderr.isatty() or left % 10 == 0:
                print(f"\r{room.name}: {left} to go ", end="" if left else "\n", file=sys.stderr, flush=True)
            if not mutant.killer:
                print(
                    f"  survived  {room.name}.py:{mutant.line}\n      {mutant.before}\n      {mutant.after}", flush=True
                )


# --- command ---------------------------------------------------------------------------------------------------------


def measure(runner: Runner, room: Room, sample: int | None) -> float:
    """Test the mutants of one room and print its line; the share that was killed."""
    begin = time.monotonic()
    everything = list(mutants(room.path.read_text(encoding="utf-8")))
    real = without_equivalent(room, everything)
    drawn = set(range(len(everything)))
    if sample is not None and sample < len(everything):  # of all, so that a new equivalent changes no sample
        drawn = set(random.Random(SEED).sample(range(len(everything)), sample))
    found = [mutant for index, mutant in enumerate(everything) if index in drawn and mutant in real]
    runner.baseline(room)
    runner.run(room, found)
    killed = sum(1 for mutant in found if mutant.killer)
    late = sum(1 for mutant in found if mutant.killer.startswith("no end"))
    share = killed / max(len(found), 1)
    print(
        f"{room.name}: {killed} of {len(found)} mutants killed, {share:.1%}"
        f" ({len(everything)} in all, {len(everything) - len(real)} of them equivalent, {late} by their time limit,"
        f" {time.monotonic() - begin:.0f} s)",
        flush=True,
    )
    return share


def main() -> int:
    """Measure the rooms that were asked for."""
    parser = argparse.ArgumentParser(prog="./x mutate", description="How many mutants of a room the tests notice.")
    parser.add_argument("room", choices=[*ROOMS, "all"])
    parser.add_argument("--sample", type=int, help=f"take so many mutants of a room at random, with seed {SEED}")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="mutants tested at a time")
    options = parser.parse_args()
    if not hasattr(os, "fork"):
        sys.exit("./x mutate needs a system that can fork: Linux or macOS")
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"  # no threads before the fork
    preload()
    shares = []
    with tempfile.TemporaryDirectory(prefix="ottava-mutate-") as folder:
        runner = Runner(Path(folder), max(options.jobs, 1))
        for name in ROOMS if options.room == "all" else [options.room]:
            room = Room(name, ROOMS[name]["tests"], ROOMS[name].get("equivalent", ()))
            shares.append(measure(runner, room, options.sample))
    return 0 if min(shares) >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
