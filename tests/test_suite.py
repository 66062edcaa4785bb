"""The tools of the tests themselves: sweeps, warm processes, the price of a test, mutants."""

from __future__ import annotations

import functools
import inspect
import itertools
import signal
import subprocess
import sys
import types
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import warm
from command import script
from sweep import AXES, sweep

HERE = Path(__file__).parent


def load_mutate() -> ModuleType:
    return script(HERE / "mutation" / "mutate.py", known=True)


def test_a_sweep_runs_every_case_from_the_same_seed() -> None:
    """Axes by name and by keyword; what is derived; fixtures are left to pytest, and so is an axis given as None."""
    seen, numbers = [], set()

    @sweep(rounding=["a", "b"], fmt=None)
    def test(tmp_path: Path, fmt: str, rounding: str, matrix: torch.Tensor) -> None:
        seen.append((tmp_path, fmt, rounding, matrix.dtype, tuple(matrix.shape)))
        numbers.add(torch.rand(()).item() if matrix.numel() == 0 else 0.0)

    assert list(inspect.signature(test).parameters) == ["tmp_path", "fmt"]
    test(tmp_path=HERE, fmt="x")
    assert len(seen) == 2 * len(AXES["layout"]) * len(AXES["dtype"])
    assert len(set(seen)) == len(seen)
    assert len(numbers) == 2  # an empty matrix draws no number


def test_a_sweep_names_the_case_that_fails() -> None:
    """In a note, which pytest prints; a case may be skipped, all of them skip the test."""

    @sweep(n=range(5))
    def test(n: int) -> None:
        if n < 3:
            pytest.skip("small")
        assert n < 4

    with pytest.raises(AssertionError) as failed:
        test()
    assert failed.value.__notes__ == ["in the case n=4"]

    @sweep(n=range(2))
    def skips(n: int) -> None:
        pytest.skip("small")

    with pytest.raises(pytest.skip.Exception, match=r"^small$"):
        skips()


@pytest.mark.skipif(sys.platform == "win32", reason="forks")
def test_a_warm_process_is_one_of_its_own(tmp_path: Path) -> None:
    """Its arguments, folder, environment, output, exit code and signals, in all three ways to start Python."""
    code = "import os, sys; print(sys.argv, os.getcwd(), os.environ.get('W'), __name__); print('e', file=sys.stderr)"
    (tmp_path / "script.py").write_text(code)
    starts = ((["-c", code], "-c"), (["script.py"], "script.py"), (["-m", "script"], str(tmp_path / "script.py")))
    for words, first in starts:
        ran = warm.run([*words, "x"], cwd=tmp_path, env={"W": "1"})
        assert (ran.returncode, ran.stdout, ran.stderr) == (0, f"{[first, 'x']} {tmp_path} 1 __main__\n", "e\n")
    ends = (("sys.exit(3)", 3, ""), ("sys.exit('no')", 1, "no\n"), ("1 / 0", 1, "ZeroDivisionError"))
    for end, exit_code, said in ends:
        ran = warm.run(["-c", f"import sys; {end}"])
        assert ran.returncode == exit_code
        assert said in ran.stderr
    before = warm.cpu_seconds()
    assert warm.run(["-c", "import time\nwhile time.process_time() < 0.5: pass"]).returncode == 0
    assert sys.platform != "linux" or warm.cpu_seconds() - before >= 0.4
    process = warm.Warm(["-c", "import time\nprint('up', flush=True)\ntime.sleep(60)"])
    process.wait_for("up\n")
    process.send_signal(signal.SIGINT)
    ended = process.wait()
    assert ended.returncode == 1
    assert ended.stderr.endswith("KeyboardInterrupt\n")


@pytest.mark.skipif(sys.platform == "win32", reason="has no CPU time of children")
def test_a_test_that_costs_too_much_fails_unless_it_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A minute of CPU time."""
    import cost

    times = [0.0, cost.FAIL_FROM + 1.0, 0.0, cost.FAIL_FROM - 1.0]
    clock = itertools.chain(times, itertools.repeat(0.0))  # this test is being measured as well
    monkeypatch.setattr(cost, "cpu_seconds", lambda: next(clock))

    def run(name: str = "") -> None:
        call = cost.pytest_runtest_call(types.SimpleNamespace(nodeid=name, get_closest_marker=lambda _: None))
        next(call)
        with pytest.raises(StopIteration):
            call.send(None)

    with pytest.raises(pytest.fail.Exception, match=f"cost {cost.FAIL_FROM + 1} s of CPU time"):
        run()
    run()
    run(next(iter(cost.listed())))


def test_the_list_of_prices_names_tests_that_exist() -> None:
    """A line of a test that was renamed would let the test cost what it likes."""
    import cost

    source = functools.cache(lambda name: (HERE.parent / name).read_text(encoding="utf-8"))
    for test in cost.listed():
        name, _, rest = test.partition("::")
        assert f"def {rest.partition('[')[0].rpartition('::')[2]}(" in source(name), test


def test_mutants_change_one_place_each() -> None:
    """Operators and numbers, not annotations; what is listed as equivalent must exist."""
    pytest.importorskip("cosmic_ray", reason="`./x mutate` installs it")
    mutate = load_mutate()
    source = "def f(x: int | None = 1, **y: int) -> int | None:\n    return g(**y) if x < 2 else -x\n"
    changed = {(mutant.line, mutant.after) for mutant in mutate.mutants(source)}
    assert (2, "return g(**y) if x <= 2 else -x") in changed
    assert (2, "return g(**y) if x < 3 else -x") in changed
    assert all("int & None" not in after and "* y" not in after for _, after in changed)
    room = mutate.Room("formats", [], [{"before": "no such line", "after": "x", "why": ""}])
    with pytest.raises(SystemExit, match="do not exist"):
        mutate.without_equivalent(room, [])


def test_rooms_name_tests_that_exist_and_say_why_a_mutant_does_not_count() -> None:
    """`rooms.toml`."""
    rooms = load_mutate().ROOMS
    known = {
        "numerics/formats",
        "numerics/rounding",
        "numerics/scaling",
        "recipe",
        "numerics/transforms",
        "ops/gemm",
        "ops/quantize",
        "engine/quantizer",
    }
    assert set(rooms) == known | {"engine/state"}
    for name, room in rooms.items():
        assert (HERE.parent / "src" / "ottava" / f"{name}.py").exists()
        assert all((HERE.parent / test).exists() for test in room["tests"])
        assert all(set(entry) == {"before", "after", "why"} and entry["why"] for entry in room.get("equivalent", ()))


WITHOUT = """
import sys, importlib.machinery as machinery, pytest
find = machinery.PathFinder.find_spec.__func__
lacks = ("gfloat", "pyarrow", "pydantic", "pydantic_core")
machinery.PathFinder.find_spec = classmethod(
    lambda cls, name, *more: None if name.split(".")[0] in lacks else find(cls, name, *more)
)
sys.exit(pytest.main(["--collect-only", "-n0", "-p", "no:cacheprovider", "-rs", "-m", *sys.argv[1:]]))
"""
"""pytest where nobody finds these packages."""


def test_tests_of_a_gpu_are_found_without_gfloat_pyarrow_and_pydantic() -> None:
    """A lent machine has few packages. A file that needs one is named and left out; without `-m gpu` it is an error."""
    files = ["kernels/test_scaled_mm.py", "nn/test_launches.py", "nn/test_graphed.py", "kernels/triton", "report"]
    words = [sys.executable, "-c", WITHOUT]
    end: dict[str, Any] = {"cwd": HERE, "capture_output": True, "text": True}
    ran = subprocess.run([*words, "gpu", *files, "numerics/test_rounding.py", "watching/test_readback.py"], **end)
    assert ran.returncode == 0, ran.stdout[-3000:]
    marked = sum("::" in line for line in ran.stdout.splitlines())
    assert marked > 50  # without a device some files mark none of their tests
    for file, lacks in (("numerics/test_rounding.py", "gfloat"), ("watching/test_readback.py", "pyarrow")):
        assert f"{file}: needs {lacks}" in ran.stdout
    ran = subprocess.run([*words, "not gpu", "numerics/test_rounding.py"], **end)
    assert ran.returncode == pytest.ExitCode.INTERRUPTED
    assert "No module named 'gfloat'" in ran.stdout
