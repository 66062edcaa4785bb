"""The device code as machine code: compiled ahead of time for every architecture that is meant, without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="Triton has no build for this machine")

FOLDER = Path(__file__).parent
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
KEPT = json.loads((FOLDER.parents[2] / "benchmarks" / "results" / "machine_code.json").read_text())
"""The figures of the casts, by `compile_ahead.py --write`."""
LIMITS = MappingProxyType({"tensor": 14, "predicted": 14, "row": 20, "1x128": 22, "128x128": 18, "1x32": 36})
"""Instructions an element of x and x.T that a cast may take from sm_90 on; an H200 issues about 20 while it moves 4
bytes."""
Facts = dict[str, dict[str, Any]]


@pytest.mark.skipif(not (TOOLS / "ptxas").exists(), reason="Triton's wheel has no ptxas for this machine")
@pytest.mark.parametrize("capability", [90, 80, 89, 100, 120])
def test_machine_code(capability: int, tmp_path: Path) -> None:
    """The laws below. One test: workers of pytest-xdist would each compile again."""
    found = compiled(capability, tmp_path)
    for law in LAWS:
        law(found, capability)


def test_casts_to_amds_formats_compile_for_mi300(tmp_path: Path) -> None:
    """All four scalings, and no register goes to memory. No MI300 has run them."""
    if not (TOOLS.parents[1] / "amd").exists():
        pytest.skip("Triton's wheel has no compiler for AMD")
    found = compiled(942, tmp_path)
    assert {one["vgpr_spill_count"] + one["sgpr_spill_count"] for one in found.values()} == {0}
    assert max(one["vgpr_count"] for one in found.values()) <= 128  # four waves of 64 threads on each SIMD
    assert len(found) == 4


def compiled(capability: int, cache: Path) -> Facts:
    """What `compile_ahead.py` says of today's source; cache: Triton's."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, str(FOLDER / "compile_ahead.py"), str(capability)]
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def casts(name: str) -> bool:
    """Whether a launch encodes."""
    return name != "dswiglu pair" and not name.startswith(
        ("adamw", "amax", "drmsnorm", "rmsnorm alone", "roll", "rows", "row statistics")
    )


def nothing_spills(found: Facts, capability: int) -> None:
    """No register goes to memory, in no launch."""
    spilled = {name for name, facts in found.items() if facts["STACK"] or facts["LOCAL"]}
    assert spilled == set()


def casts_keep_their_figures(found: Facts, capability: int) -> None:
    """Limits of any Triton; with the Triton of the kept table no cast is worse than there."""
    for name, most in LIMITS.items():
        # a compiler's mood, as `compile_ahead.worse` has it: Triton 3.6 gives 1x128 22.1 on sm_120
        assert found[name]["instructions"] <= most + 0.2 or capability < 90, name
        # 1x128 spills on sm_120 under the 128 registers that two blocks leave it
        assert found[name]["blocks"] >= 2 or capability not in (90, 100), name
    if triton.__version__ == KEPT["triton"]:
        for name, old in KEPT[f"sm_{capability}"].items():
            new = found[name]
            assert new["instructions"] <= old["instructions"] + 0.2, name  # as `compile_ahead.worse` has it
            assert new["blocks"] >= min(old["blocks"], 2), name
            assert new["spilled"] <= old["spilled"], name


def memory_is_moved_16_bytes_at_a_time(found: Facts, capability: int) -> None:
    """x is loaded, and the codes of x and of x.T are stored, 16 bytes a thread: nothing narrower touches them."""
    for name, facts in found.items():
        if name == "roll":  # touches no x
            continue
        assert facts["loads16"] > 0, name
        assert facts["loads"] <= ("norm" in name), name  # of gamma, one number a thread
        assert facts["byte_stores"] == 0, name
        if not name.startswith(("amax", "row statistics")):
            assert facts["stores16"] > 0, name


def arithmetic_is_exact(found: Facts, capability: int) -> None:
    """Subnormals are not flushed and divisions are correctly rounded, as the bits of the reference need.

    But for exp and tanh of CUDA's library, in which torch's kernels have them, too.
    """
    for name, facts in found.items():
        if "swiglu" in name or "gelu" in name:
            continue
        assert not facts["flushes"], name
        assert facts["approximate"] == 0, name


def conversions_are_the_hardwares_where_it_has_them(found: Facts, capability: int) -> None:
    """Two numbers an instruction from sm_90 on; before, integers round: sm_89's way is another in each Triton."""
    for name, facts in found.items():
        assert (facts["conversions"] > 0) == (capability >= 90 and casts(name)), name


def infinity_times_zero_is_not_folded(found: Facts, capability: int) -> None:
    """To each number that is cast 0 times itself is added; a conversion takes two."""
    for name, facts in found.items():
        assert (facts["zero_products"] > 0) == casts(name), name
        assert facts["zero_products"] == 2 * facts["conversions"] or capability < 90, name


def one_amax_a_program_is_atomic(found: Facts, capability: int) -> None:
    """Blocks need none; the predicted cast takes the amax in the same pass; amax takes it of tensor, rows, columns."""
    with_atomics = {name for name, facts in found.items() if facts["atomics"] > 0}
    casts = {"predicted", "gelu, predicted", "dgelu, predicted", "amax", "amax of layernorm"}
    assert with_atomics == casts or capability != 90


def adamw_fuses_what_torch_fuses(found: Facts, capability: int) -> None:
    """lerp, addcmul and addcdiv have one multiply-add an element each; a thread has 8 elements."""
    for name in found:
        assert not name.startswith("adamw") or found[name]["fused"] == 3 * 8 or capability != 90


def a_window_is_read_before_it_is_written(found: Facts, capability: int) -> None:
    """Threads wait for each other between the two, since each writes to where its neighbour has read."""
    assert found["roll"]["barriers"] > 0


LAWS = (
    nothing_spills,
    casts_keep_their_figures,
    memory_is_moved_16_bytes_at_a_time,
    arithmetic_is_exact,
    conversions_are_the_hardwares_where_it_has_them,
    infinity_times_zero_is_not_folded,
    one_amax_a_program_is_atomic,
    adamw_fuses_what_torch_fuses,
    a_window_is_read_before_it_is_written,
)
