"""The device code as machine code: compiled ahead of time for every architecture that is meant, without a GPU."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton has no build for this machine")

FOLDER = Path(__file__).parent
every_architecture = pytest.mark.parametrize("capability", [90, 80, 89, 100])
pytestmark = pytest.mark.slow  # each architecture takes the compiler ten seconds


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Triton's cache of this run: what is compiled is today's source."""
    return tmp_path_factory.mktemp("triton")


@functools.cache
def compiled(capability: int, cache: Path) -> dict[str, dict[str, Any]]:
    """What `compile_ahead.py` says."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, str(FOLDER / "compile_ahead.py"), str(capability)]
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


@every_architecture
def test_nothing_spills(capability: int, cache: Path) -> None:
    """No register goes to memory, in no launch."""
    spilled = {name: facts for name, facts in compiled(capability, cache).items() if facts["STACK"] or facts["LOCAL"]}
    assert spilled == {}


@every_architecture
def test_memory_is_moved_16_bytes_at_a_time(capability: int, cache: Path) -> None:
    """x is loaded, and the codes of x and of x.T are stored, 16 bytes a thread: nothing narrower touches them."""
    for name, facts in compiled(capability, cache).items():
        if name in ("roll", "one element"):  # touches no x, or no more than 2 bytes of it
            continue
        assert facts["loads16"] > 0, name
        assert facts["loads"] == 0, name
        assert facts["byte_stores"] == 0, name
        if not name.startswith(("amax", "statistics", "row statistics")):
            assert facts["stores16"] > 0, name


@every_architecture
def test_arithmetic_is_exact(capability: int, cache: Path) -> None:
    """Subnormals are not flushed and divisions are correctly rounded, as the bits of the reference need.

    But for exp and tanh of CUDA's library, in which torch's kernels have them, too.
    """
    for name, facts in compiled(capability, cache).items():
        if "swiglu" in name or "gelu" in name:
            continue
        assert not facts["flushes"], name
        assert facts["approximate"] == 0, name


@every_architecture
def test_conversions_are_the_hardwares_where_it_has_them(capability: int, cache: Path) -> None:
    """Two numbers an instruction from sm_90 on; before, integers round: sm_89's way is another in each Triton."""
    for name, facts in compiled(capability, cache).items():
        casts = not name.startswith(("adamw", "amax", "roll", "rows", "row statistics", "statistics", "one element"))
        assert (facts["conversions"] > 0) == (capability >= 90 and casts), name


def test_one_amax_a_program_is_atomic(cache: Path) -> None:
    """Blocks need none; the predicted cast takes the amax in the same pass; amax takes it of tensor, rows, columns."""
    atomics = {name: facts["atomics"] > 0 for name, facts in compiled(90, cache).items()}
    found = {"predicted", "gelu, predicted", "dgelu, predicted", "amax", "amax of layernorm"}
    looks = {"statistics", "statistics 1x128", "one element"}
    assert {name for name, some in atomics.items() if some} == found | looks


@every_architecture
def test_statistics_round_the_error_as_a_cpu_does(capability: int, cache: Path) -> None:
    """x - code * scale_inv is a product and a difference, each rounded: nothing is fused."""
    assert compiled(capability, cache)["statistics"]["fused"] == 0


def test_adamw_fuses_what_torch_fuses(cache: Path) -> None:
    """lerp, addcmul and addcdiv have one multiply-add an element each; a thread has 8 elements."""
    for name in ("adamw", "adamw, remainder"):
        assert compiled(90, cache)[name]["fused"] == 3 * 8


@every_architecture
def test_a_window_is_read_before_it_is_written(capability: int, cache: Path) -> None:
    """Threads wait for each other between the two, since each writes to where its neighbour has read."""
    assert compiled(capability, cache)["roll"]["barriers"] > 0
