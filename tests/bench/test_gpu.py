"""`ottava bench gpu` as a whole: every suite runs on tiny shapes, on a CPU too. Its numbers mean nothing here."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from ottava.bench import gpu
from ottava.bench.method import Run, WrongResultError
from ottava.kernels import reference
from ottava.nn.plan import Device
from ottava.recipe import RECIPES

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


def test_an_unknown_suite_is_refused_before_anything_runs() -> None:
    """With the nearest known one."""
    with pytest.raises(ValueError, match=r"bench gpu: unknown suite 'linaer'.*linear"):
        next(gpu.bench(SMOKE, ["linaer"]))


KERNELS = Run(torch.device("cpu"), smoke=True, rounds=2)


def test_ceilings_give_every_constant_that_can_be_measured() -> None:
    """All of a Device's but the start of a GEMM, which a large one does not show; the rates are those of the table."""
    found = gpu.ceilings(KERNELS)
    names = {field.name for field in dataclasses.fields(Device)}
    assert set(found["constants"]) == names - {"start"}
    rows = {row["what"]: row for row in found["rows"]}
    assert found["constants"]["bf16"] == rows["bf16"]["flops"]
    assert found["constants"]["tensor"] == rows["tensor"]["flops"] / rows["bf16"]["flops"]
    assert found["constants"]["launch"] == rows["launch"]["median"]
    assert all(rows[name]["relative_error"] < 4e-3 for name in ("tensor", "row", "block"))


def test_other_codes_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Casts at once are compared with the reference before they are timed."""
    spec = RECIPES["tensorwise"].fprop.lhs
    assert spec is not None
    x = torch.randn(8, 8)

    def both(x: torch.Tensor, *_: object) -> tuple[reference.Cast, reference.Cast]:
        return reference.quantize(x, spec), reference.quantize(x.t() * 2, spec)

    monkeypatch.setattr(gpu.triton_quantize, "quantize_both", both)
    gpu.same_codes("scaled alike", x, spec, spec, None)  # twice the numbers, half the scale: the same codes
    monkeypatch.setattr(gpu.triton_quantize, "quantize_both", lambda x, *_: both(x.t()))
    with pytest.raises(WrongResultError, match="transposed: codes differ from those of the reference"):
        gpu.same_codes("transposed", x, spec, spec, None)
