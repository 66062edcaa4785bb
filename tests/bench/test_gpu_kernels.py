"""Kernels by themselves: what is compared, and the constants that feed the planner."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from ottava.bench import gpu_kernels
from ottava.bench.method import Run, WrongResultError
from ottava.kernels import reference
from ottava.nn.plan import Device
from ottava.recipe import RECIPES

SMOKE = Run(torch.device("cpu"), smoke=True, rounds=2)


def test_ceilings_give_every_constant_that_can_be_measured() -> None:
    """All of a Device's but the start of a GEMM, which a large one does not show; the rates are those of the table."""
    found = gpu_kernels.ceilings(SMOKE)
    names = {field.name for field in dataclasses.fields(Device)}
    assert set(found["constants"]) == names - {"start"}
    rows = {row["what"]: row for row in found["rows"]}
    assert found["constants"]["bf16"] == rows["bf16"]["flops"]
    assert found["constants"]["tensor"] == rows["tensor"]["flops"] / rows["bf16"]["flops"]
    assert found["constants"]["launch"] == rows["launch"]["median"]
    assert all(rows[name]["relative_error"] < 4e-3 for name in ("tensor", "row", "block"))


def test_casts_of_every_recipe_are_timed() -> None:
    """One by one everywhere; at once where there is a kernel, whose refusal stands in the row."""
    rows = gpu_kernels.cast(SMOKE)["rows"]
    assert {row["recipe"] for row in rows} == {"tensorwise", "rowwise", "blockwise", "mxfp8", "delayed", "guarded"}
    assert {row["triton"] for row in rows} == {"triton: runs on cuda; got cpu"}


def test_other_codes_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Casts at once are compared with the reference before they are timed."""
    spec = RECIPES["tensorwise"].fprop.lhs
    assert spec is not None
    x = torch.randn(8, 8)

    def both(x: torch.Tensor, *_: object) -> tuple[reference.Cast, reference.Cast]:
        return reference.quantize(x, spec), reference.quantize(x.t() * 2, spec)

    monkeypatch.setattr(gpu_kernels.triton_quantize, "quantize_both", both)
    gpu_kernels.same_codes("scaled alike", x, spec, spec, None)  # twice the numbers, half the scale: the same codes
    monkeypatch.setattr(gpu_kernels.triton_quantize, "quantize_both", lambda x, *_: both(x.t()))
    with pytest.raises(WrongResultError, match="transposed: codes differ from those of the reference"):
        gpu_kernels.same_codes("transposed", x, spec, spec, None)
