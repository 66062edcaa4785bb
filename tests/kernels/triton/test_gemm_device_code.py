"""The GEMM as machine code of sm_90: compiled ahead of time under every configuration that is measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton has no build for this machine")

FOLDER = Path(__file__).parent
SHARED_MEMORY = 227 * 1024
"""Of one program on sm_90. Source: CUDA C++ programming guide, compute capability 9.0."""

Facts = dict[str, dict[str, Any]]


def test_machine_code(tmp_path: Path) -> None:
    """The laws below, of today's source. One test: workers of pytest-xdist would each compile again."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, str(FOLDER / "compile_gemm_ahead.py")]
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    found: Facts = json.loads(run.stdout.splitlines()[-1])
    for law in LAWS:
        law(found)


def nothing_spills_and_all_fits(found: Facts) -> None:
    """Tiles and partial sums stay in registers, stages in shared memory."""
    assert {name: facts for name, facts in found.items() if facts["STACK"] or facts["LOCAL"]} == {}
    assert {name: facts["shared"] for name, facts in found.items() if facts["shared"] > SHARED_MEMORY} == {}


def fp8_tensor_cores_multiply_what_tma_brings(found: Facts) -> None:
    """Hopper's own instructions on the codes as they are: nothing is decoded on the way."""
    for name, facts in found.items():
        wanted = {"E5M2 x E4M3": "e5m2.e4m3", "E4M3 x E5M2": "e4m3.e5m2"}.get(name, "e4m3.e4m3")
        assert facts["wgmma"] == [wanted], name
        assert facts["tma_loads"] >= 2, name


def results_leave_through_tma_where_rows_allow(found: Facts) -> None:
    """Rows of 16 bytes; others go 16 bytes a thread where they can."""
    assert {name for name, facts in found.items() if facts["tma_stores"] == 0} == {"odd N"} & found.keys()
    assert all(facts["byte_stores"] == 0 for name, facts in found.items() if name == "odd N")


def subnormals_are_kept(found: Facts) -> None:
    """Neither flushed nor divided approximately."""
    assert not any(facts["flushes"] or facts["approximate"] for facts in found.values())


LAWS = (
    nothing_spills_and_all_fits,
    fp8_tensor_cores_multiply_what_tma_brings,
    results_leave_through_tma_where_rows_allow,
    subnormals_are_kept,
)
