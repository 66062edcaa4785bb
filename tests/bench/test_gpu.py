"""`ottava bench gpu` as a whole: every suite runs on tiny shapes, on a CPU too. Its numbers mean nothing here."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from ottava.bench import gpu
from ottava.bench.method import Run, WrongResultError
from ottava.kernels import reference
from ottava.nn.plan import Device
from ottava.recipe import RECIPES
from ottava.train.model import VOCABULARY

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


KERNELS = Run(torch.device("cpu"), smoke=True, rounds=2)
ON_CPU = Run(torch.device("cpu"), smoke=True, rounds=2, rivals=False, compiled=False)


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


def test_casts_of_every_recipe_are_timed() -> None:
    """One by one everywhere; at once where there is a kernel, whose refusal stands in the row."""
    rows = gpu.cast(KERNELS)["rows"]
    assert {row["recipe"] for row in rows} == {"tensorwise", "rowwise", "blockwise", "mxfp8", "delayed", "guarded"}
    assert {row["triton"] for row in rows} == {"triton: runs on cuda; got cpu"}


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


def test_rows_of_layers_name_kernels_errors_and_predictions() -> None:
    """BF16 is the unit; FP8 is near it, not equal."""
    rows = gpu.linear(ON_CPU)["rows"]
    assert rows[0]["recipe"] == "bf16"
    assert all(0 < row["relative_error"] < 0.15 for row in rows[1:])
    assert all(set(row["ran"]) == {"fprop", "dgrad", "wgrad"} and row["predicted"] > 0 for row in rows[1:])
    assert rows[0]["relative_error"] == 0
    assert rows[0]["speedup"] == 1


def test_predicted_scales_are_predicted_when_they_are_timed() -> None:
    """Otherwise delayed scaling would be timed as it is in its first step only."""
    found = gpu.contenders(ON_CPU, lambda: gpu.linear_layer(ON_CPU, 32, 32), ("delayed",))
    x, dy = torch.randn(8, 32).bfloat16().requires_grad_(), torch.randn(8, 32).bfloat16()
    gpu.settled({one.name: gpu.step(one.forward, one.model, x, dy) for one in found}, found)
    assert all(door.scale > 0 for door in found[1].model.quantizers.doors)  # type: ignore[union-attr]


def test_the_block_is_causal_and_the_seed_layer_is_not() -> None:
    """A later token changes earlier outputs only without a mask."""
    torch.manual_seed(0)
    x = torch.randn(2, 6, 32)
    later = x.clone()
    later[:, 4] += 1
    for layer, causal in ((gpu.DecoderLayer(32, 64, 4, 2), True), (gpu.SeedLayer(32, 64, 4, 2), False)):
        y, changed = layer(x), layer(later)
        assert y.shape == x.shape
        assert torch.equal(y[:, :4], changed[:, :4]) is causal
        assert not torch.equal(y[:, 4:], changed[:, 4:])


def test_training_learns_and_counts_tokens() -> None:
    """Losses begin at about ln 256 for all, and are those of the steps that were timed."""
    rows = gpu.train(ON_CPU)["rows"]
    assert [row["recipe"] for row in rows] == ["bf16", "tensorwise", "delayed", "guarded"]
    for row in rows:
        assert abs(row["first_loss"] - math.log(VOCABULARY)) < 0.5
        assert row["last_loss"] < row["first_loss"]
        assert row["steps"] == 3  # one to warm up and two that count
        assert row["tokens_per_second"] == 32 / row["median"]


def test_the_text_can_be_learned() -> None:
    """Most bytes follow from the one before."""
    text = gpu.learnable(ON_CPU, 64, 100)
    follows = (text[:, 1:] == (text[:, :-1] + 7) % VOCABULARY).double().mean()
    assert text.shape == (64, 101)
    assert 0.7 < follows < 0.83  # (7/8)**2 and chance
