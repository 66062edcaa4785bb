"""Casts that draw numbers or search scales: the reference's bits from the same seed, for every format and rule."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from kernels.native.older_builds import for_each_older_build, take_library, use_older_build
from layout_samples import LAYOUTS, tiles
from ottava.kernels import reference
from ottava.kernels.native import build as native_build
from ottava.kernels.native import quantize as native_quantize
from ottava.numerics.formats import BF16, E2M1, E2M3, E3M2, E4M3, E4M3FNUZ, E5M2, E5M2FNUZ, Format
from ottava.numerics.scaling import BLOCK_1X16, BLOCK_16X16, TE_FOUR_OVER_SIX, Granularity
from ottava.numerics.tensor import QuantizationSpec
from ottava.numerics.transforms import Hadamard
from ottava.ops.quantize import explain_quantize, quantize
from sweep import sweep

SMALL = (E4M3, E5M2, E2M1, E2M3, E3M2, E4M3FNUZ, E5M2FNUZ)
STOCHASTIC = QuantizationSpec(E2M1, BLOCK_1X16, "e4m3", rounding="stochastic")
AT_RANDOM = tuple(
    QuantizationSpec(E2M1, Granularity.parse(size), rounding="stochastic")
    for size in ("tensor", "row", "1x16", "*x1", "128x128")
)
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
BY_RULE = (FOUR, FOUR_WEIGHT, EDEN, *RAGGED, *TE, *TE_WEIGHT)
REASON = native_build.load("stochastic").reason or native_build.load("block_scales").reason
needs_library = pytest.mark.skipif(bool(REASON), reason=REASON)


def assert_same(x: Tensor, spec: QuantizationSpec, scale: Tensor | None = None, seed: int = 0) -> None:
    """Codes (those of NaN too), scales and amax; NaN equals NaN."""
    assert native_quantize.supports_quantize(x, spec, scale) is None
    torch.manual_seed(seed)
    ours = native_quantize.quantize(x, spec, scale)
    after = torch.rand(1)
    torch.manual_seed(seed)
    truth = reference.quantize(x, spec, scale)
    assert torch.equal(torch.rand(1), after)  # as many numbers were drawn
    assert ours.data.dtype == truth.data.dtype
    assert torch.equal(ours.data.view(torch.uint8), truth.data.contiguous().view(torch.uint8))
    for a, b in zip(ours[1:], truth[1:], strict=True):
        assert torch.equal(a.nan_to_num(-7.0), b.nan_to_num(-7.0))


@pytest.mark.slow
@needs_library
@sweep
def test_every_spec_and_layout_gives_the_references_bits(spec: QuantizationSpec, dtype: torch.dtype) -> None:
    """Every format of at most 8 bits; zeros, subnormals, infinities and NaN of both signs, rows far apart."""
    spec = replace(spec, rounding="stochastic")
    for make in LAYOUTS.values():
        assert_same(make(dtype), spec)
    for x in (tiles(37, 131, dtype), tiles(131, 37, dtype).t(), tiles(300, 260, dtype)[:, 1:259]):
        x[0, 5], x[3, 7], x[30, 30], x[20, 20], x[5] = math.inf, -math.inf, math.nan, -math.nan, x[5] * 1e-6
        x[6], x[7, ::2] = 0.0, -0.0
        for fmt in SMALL:
            assert_same(x, replace(spec, format=fmt))


@needs_library
@sweep(spec=BY_RULE)
def test_every_rule_and_layout_gives_the_references_bits(spec: QuantizationSpec, dtype: torch.dtype) -> None:
    """Zeros, subnormals, infinities and NaN of both signs; groups and blocks that the edge cuts off."""
    for make in LAYOUTS.values():
        assert_same(make(dtype), spec)
    for x in (tiles(37, 131, dtype), tiles(131, 37, dtype).t(), tiles(48, 260, dtype)[:, 1:259], torch.randn(40, 256)):
        x[0, 5], x[3, 7], x[30, 30], x[20, 20], x[5] = math.inf, -math.inf, math.nan, -math.nan, x[5] * 1e-6
        x[6], x[7, ::2], x[8:24, :16], x[9] = 0.0, -0.0, 0.0, x[9] * torch.finfo(dtype).smallest_normal
        assert_same(x, spec, seed=5)


@needs_library
@sweep(fmt=SMALL, scale=[1.0, 0.37, 2.0**-120, 3e38])
def test_every_16_bit_number_is_rounded_as_the_reference_does(fmt: Format, dtype: torch.dtype, scale: float) -> None:
    """Subnormals, saturation and NaN; for fp32, the same patterns as its upper half."""
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16)
    x = patterns.view(torch.bfloat16).float() if dtype == torch.float32 else patterns.view(dtype)
    for scaling in ("delayed", "guarded"):
        spec = QuantizationSpec(fmt, scaling=scaling, rounding="stochastic")  # type: ignore[arg-type]
        assert_same(x.view(64, 1024), spec, torch.tensor(scale), seed=11)


@needs_library
@sweep(spec=[FOUR, FOUR_WEIGHT, EDEN, *TE[:2]])
def test_every_16_bit_number_is_scaled_as_the_reference_does(spec: QuantizationSpec, dtype: torch.dtype) -> None:
    """Blocks of neighbours, and blocks of all magnitudes."""
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16)
    x = patterns.view(torch.bfloat16).float() if dtype == torch.float32 else patterns.view(dtype)
    for order in (torch.arange(1 << 16), torch.randperm(1 << 16)):
        assert_same(x[order].view(64, 1024), spec, seed=11)


@needs_library
@sweep(spec=[*AT_RANDOM, FOUR, FOUR_WEIGHT, EDEN])
def test_threads_change_no_bit(spec: QuantizationSpec) -> None:
    """One, two, and more than there are cores; sizes that do not divide."""
    x, casts = tiles(700, 333, torch.bfloat16), []
    for threads in (1, 2, 5):
        torch.manual_seed(0)
        torch.set_num_threads(threads)
        try:
            casts.append(native_quantize.quantize(x, spec))
        finally:
            torch.set_num_threads(1)
    for other in casts[1:]:
        assert all(map(torch.equal, casts[0], other))


@needs_library
@pytest.mark.parametrize("library", ["stochastic", pytest.param("block_scales", marks=pytest.mark.slow)])
@for_each_older_build
def test_instruction_sets_change_no_bit(
    library: str, flags: tuple[str, ...], dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three older builds against the reference; the default build is what all other tests run."""
    use_older_build(library, flags, dtype, tmp_path, monkeypatch)
    x = tiles(140, 300, dtype)
    x[0, 5], x[3, 7] = math.inf, math.nan
    at_random = [QuantizationSpec(fmt, BLOCK_1X16, rounding="stochastic") for fmt in SMALL]
    for spec in at_random if library == "stochastic" else BY_RULE:
        assert_same(x, spec)


@needs_library
def test_recomputation_draws_the_same_numbers() -> None:
    """Checkpointing puts torch's generator back, from which the one seed of a cast is drawn."""
    seen: list[Tensor] = []

    def layer(x: Tensor) -> Tensor:
        seen.append(quantize(x, STOCHASTIC).data)
        return x * x

    x = torch.randn(64, 64, requires_grad=True)
    y = checkpoint(layer, x, use_reentrant=False)
    torch.rand(7)
    y.sum().backward()  # type: ignore[union-attr]
    quantize(x, STOCHASTIC)
    assert len(seen) == 2
    assert torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[0], quantize(x, STOCHASTIC).data)


def test_what_it_cannot_cast_it_refuses() -> None:
    """With the reason."""
    x = torch.ones(2, 2)
    for spec, x_, message in (
        (QuantizationSpec(BF16, rounding="stochastic"), x, "signed formats of at most 8 bits; got BF16"),
        (replace(FOUR, block_scale="unclipped"), x, "has no rule 'unclipped' for block scales"),
        (replace(STOCHASTIC, margin=70), x, "takes at most 64 octaves; got margin 70"),
        (STOCHASTIC, torch.ones(2, 2, device="meta"), "runs on a cpu; got meta"),
        (FOUR, torch.ones(2, 2, device="meta"), "runs on a cpu; got meta"),
        (RAGGED[1], torch.ones(1, 20000), "blocks of at most 16,384 elements; got row"),
    ):
        assert message in str(native_quantize.supports_quantize(x_, spec))
    for spec in (STOCHASTIC, FOUR):
        with FakeTensorMode():
            assert "takes plain tensors" in str(native_quantize.supports_quantize(torch.ones(2, 2), spec))
        assert "rounds to nearest by the amax of blocks" in str(native_quantize.supports_rounding(x, spec))


@pytest.mark.parametrize(
    "library, spec", [("stochastic", STOCHASTIC), ("quantize", STOCHASTIC), ("block_scales", FOUR)]
)
def test_without_a_library_the_reference_runs(
    library: str, spec: QuantizationSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bits; the reason is in the explanation."""
    x = torch.randn(40, 300)
    torch.manual_seed(2)
    before = quantize(x, spec)
    take_library(library, monkeypatch)
    assert explain_quantize(x, spec).split("\n") == ["native_quantize: no C++ compiler", "reference: runs"]
    torch.manual_seed(2)
    assert torch.equal(quantize(x, spec).data, before.data)
