"""The reference's bits by every rule for block scales, for every block, dtype and layout, on any number of threads."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from kernels.native.older_builds import for_each_older_build, use_older_build
from layout_samples import LAYOUTS, tiles
from ottava.kernels import reference
from ottava.kernels.native import block_scales as native_block_scales
from ottava.kernels.native.build import Built
from ottava.numerics.block_scales import TE_FOUR_OVER_SIX
from ottava.numerics.formats import E2M1
from ottava.numerics.scaling import BLOCK_1X16, BLOCK_16X16, Granularity
from ottava.numerics.tensor import QuantizationSpec
from ottava.numerics.transforms import Hadamard
from ottava.ops.quantize import explain_quantize, quantize
from sweep import sweep

FOUR, FOUR_WEIGHT = (
    QuantizationSpec(E2M1, blocks, "e4m3", block_scale="four_over_six") for blocks in (BLOCK_1X16, BLOCK_16X16)
)
EDEN = QuantizationSpec(E2M1, BLOCK_1X16, "e4m3", block_scale="ms_eden", transform=Hadamard(128, "fresh"))
RAGGED = tuple(
    QuantizationSpec(E2M1, Granularity.parse(blocks), "e4m3", block_scale="four_over_six")
    for blocks in ("3x5", "row", "*x4")
)
TE = tuple(replace(FOUR, block_scale=rule) for rule in TE_FOUR_OVER_SIX)
TE_WEIGHT = tuple(replace(spec, granularity=grid) for spec in TE[:2] for grid in (BLOCK_16X16, Granularity(3, 5)))
SPECS = (FOUR, FOUR_WEIGHT, EDEN, *RAGGED, *TE, *TE_WEIGHT)
needs_library = pytest.mark.skipif(bool(native_block_scales.built().reason), reason=native_block_scales.built().reason)


def assert_same(x: Tensor, spec: QuantizationSpec, seed: int = 0) -> None:
    """Codes (those of NaN too), scales and amax from the same random numbers; NaN equals NaN."""
    assert native_block_scales.supports_quantize(x, spec) is None
    torch.manual_seed(seed)
    ours = native_block_scales.quantize(x, spec)
    after = torch.rand(1)
    torch.manual_seed(seed)
    truth = reference.quantize(x, spec)
    assert torch.equal(torch.rand(1), after)  # as many numbers were drawn
    assert torch.equal(ours.data, truth.data), spec
    for a, b in zip(ours[1:], truth[1:], strict=True):
        assert torch.equal(a.nan_to_num(-7.0), b.nan_to_num(-7.0)), spec


@needs_library
@sweep(spec=SPECS)
def test_every_rule_and_layout_gives_the_references_bits(spec: QuantizationSpec, dtype: torch.dtype) -> None:
    """Zeros, subnormals, infinities and NaN of both signs; groups and blocks that the edge cuts off."""
    for make in LAYOUTS.values():
        assert_same(make(dtype), spec)
    for x in (tiles(37, 131, dtype), tiles(131, 37, dtype).t(), tiles(48, 260, dtype)[:, 1:259], torch.randn(40, 256)):
        x[0, 5], x[3, 7], x[30, 30], x[20, 20], x[5] = math.inf, -math.inf, math.nan, -math.nan, x[5] * 1e-6
        x[6], x[7, ::2], x[8:24, :16], x[9] = 0.0, -0.0, 0.0, x[9] * torch.finfo(dtype).smallest_normal
        assert_same(x, spec, seed=5)


@needs_library
@sweep(spec=[FOUR, FOUR_WEIGHT, EDEN, *TE[:2]])
def test_every_16_bit_number_is_cast_as_the_reference_does(spec: QuantizationSpec, dtype: torch.dtype) -> None:
    """Blocks of neighbours, and blocks of all magnitudes."""
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16)
    x = patterns.view(torch.bfloat16).float() if dtype == torch.float32 else patterns.view(dtype)
    for order in (torch.arange(1 << 16), torch.randperm(1 << 16)):
        assert_same(x[order].view(64, 1024), spec, seed=11)


@needs_library
@sweep(spec=[FOUR, FOUR_WEIGHT, EDEN])
def test_threads_change_no_bit(spec: QuantizationSpec) -> None:
    """One, two, and more than there are cores; sizes that do not divide."""
    x, casts = tiles(700, 333, torch.bfloat16), []
    for threads in (1, 2, 5):
        torch.manual_seed(0)
        torch.set_num_threads(threads)
        try:
            casts.append(native_block_scales.quantize(x, spec))
        finally:
            torch.set_num_threads(1)
    for other in casts[1:]:
        assert all(map(torch.equal, casts[0], other))


@needs_library
@for_each_older_build
def test_instruction_sets_change_no_bit(
    flags: tuple[str, ...], dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three older builds against the reference; the default build is what all other tests run."""
    use_older_build(native_block_scales, "block_scales.cpp", flags, dtype, tmp_path, monkeypatch)
    x = tiles(140, 300, dtype)
    x[0, 5], x[3, 7] = math.inf, math.nan
    for spec in SPECS:
        assert_same(x, spec)


def test_what_it_cannot_cast_it_refuses() -> None:
    """With the reason."""
    x = torch.ones(2, 2)
    for spec, x_, message in (
        (QuantizationSpec(E2M1), x, "chooses scales by a rule for FP4; got amax"),
        (replace(FOUR, rounding="stochastic"), x, "got stochastic"),
        (FOUR, torch.ones(2, 2, device="meta"), "runs on a cpu; got meta"),
        (RAGGED[1], torch.ones(1, 20000), "blocks of at most 16,384 elements; got row"),
    ):
        assert message in str(native_block_scales.supports_quantize(x_, spec))
    with FakeTensorMode():
        assert "takes plain tensors" in str(native_block_scales.supports_quantize(torch.ones(2, 2), FOUR))


def test_without_a_library_the_reference_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits; the reason is in the explanation."""
    x = torch.randn(40, 300)
    before = quantize(x, FOUR)
    monkeypatch.setattr(native_block_scales, "built", lambda *_: Built(None, "no C++ compiler"))
    assert explain_quantize(x, FOUR).split("\n")[2:] == ["native_block_scales: no C++ compiler", "reference: runs"]
    assert torch.equal(quantize(x, FOUR).data, before.data)
