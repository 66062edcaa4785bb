"""Kept launches hand to the driver what Triton's own launch hands over, in a process without the interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton has no build for this machine")
ROOT = Path(__file__).parents[3]
MOST_CALLS = {"tensorwise": 165, "rowwise": 165, "delayed": 239}
"""Python functions, torch's with them, that a warm forward and backward calls. Without an optimizer a delayed layer
asks whether the weights have changed. Three of them are those of the faked GEMMs."""
MOST_OF_ADAMW = 3700
"""The same for a step of 64 BF16 parameters beside their masters."""


def ran(*words: str) -> list[dict[str, Any]]:
    """The JSON lines of a script that compiles kernels."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT / "benchmarks")])
    done = subprocess.run([sys.executable, *words], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("script", ["benchmarks/host_cost.py", "tests/kernels/triton/compile_ahead.py"])
def test_a_script_that_compiles_says_that_it_needs_triton(script: str) -> None:
    program = f"import runpy, sys; sys.modules['triton'] = None; runpy.run_path({script!r})"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.stderr.startswith(f"{Path(script).name} compiles Triton's kernels, and ")
    assert "pip install triton" in done.stderr


def test_a_kept_launch_is_tritons_own() -> None:
    """Every kernel of the casts, two dtypes, odd shapes and addresses: kernel, grid, addresses, numbers. What another
    device or a profiler would change takes Triton's way. AdamW launches once for all whose size is a multiple of 16,
    once for all others, and once to count their steps."""
    (found,) = ran("tests/kernels/triton/launch_ahead.py")
    assert found["launches"] == found["kept"] > 60
    for step in found["adamw"]:
        assert step["launches"] == ["aten::_foreach_add_", "adamw_kernel", "adamw_kernel"]
        assert step["calls"] <= MOST_OF_ADAMW


@pytest.mark.skipif(not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm_v2", "CPU"), reason="no GEMM")
def test_a_warm_linear_calls_little_python() -> None:
    """Counted, not timed; the launches of a step are those of tests/nn/test_launches.py."""
    rows = {row["layer"]: row for row in ran("benchmarks/host_cost.py", "--rounds", "1")}
    assert {name: rows[name]["triton_launches"] for name in MOST_CALLS} == dict.fromkeys(MOST_CALLS, 6)
    assert all(rows[name]["python_calls"] <= most for name, most in MOST_CALLS.items()), rows
