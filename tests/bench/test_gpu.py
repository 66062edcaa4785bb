"""`ottava bench gpu` as a whole: every suite runs on tiny shapes, on a CPU too. Its numbers mean nothing here."""

from __future__ import annotations

import pytest
import torch

from ottava.bench import gpu
from ottava.bench.method import Run

SMOKE = Run(
    torch.device("cuda" if torch.cuda.is_available() else "cpu"), smoke=True, rounds=2, rivals=False, compiled=False
)


@pytest.mark.parametrize("suite", gpu.SUITES)
def test_every_suite_has_rows_with_times(suite: str) -> None:
    """Percentiles in order, and one line of the table a row."""
    ((name, found),) = gpu.bench(SMOKE, [suite])
    assert name == suite
    assert found["rows"]
    assert all(0 < row["p10"] <= row["median"] <= row["p90"] for row in found["rows"])
    assert len(found["gpu_state"]) == 2
    assert len(gpu.table(found["rows"]).splitlines()) == len(found["rows"])


def test_a_line_says_what_was_measured() -> None:
    """Name, time with percentiles, and what else the row has."""
    times = {"median": 1e-3, "p10": 9e-4, "p90": 2e-3}
    rows = [
        {"recipe": "delayed", "mode": "graph", "shape": [1, 2], **times, "speedup": 1.5, "predicted": 1.6},
        {"what": "copy", "bytes_per_second": 4e12, **times},
        {"recipe": "bf16", "what": "host", "launches": 3, "step_bytes": 2**30, **times},
    ]
    delayed, copy, host = gpu.table(rows).splitlines()
    assert " ".join(delayed.split()) == "delayed graph [1, 2] 1000.0 us (900.0 to 2000.0) 1.50 x BF16 (predicted 1.60)"
    assert copy.endswith("4 TB/s")
    assert host.endswith("3 launches 1.00 GiB")


def test_an_unknown_suite_is_refused_before_anything_runs() -> None:
    """With the nearest known one."""
    with pytest.raises(ValueError, match=r"bench gpu: unknown suite 'linaer'.*linear"):
        next(gpu.bench(SMOKE, ["linaer"]))


def test_the_report_says_where_it_was_made() -> None:
    """Versions of what is installed, None for what is not; the constants that predictions were made with."""
    said = gpu.where(SMOKE)
    assert said["versions"]["torch"] == torch.__version__
    assert set(said["versions"]) == {"ottava", "torch", "triton", "torchao", "liger-kernel", "transformer-engine"}
    assert said["smoke"] is True
    assert said["assumed"]["name"] == "H200 (assumed)"
