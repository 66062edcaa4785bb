"""The reference's bits from the same seed, for every format, block, dtype and layout, on any number of threads."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from kernels.native.older_builds import for_each_older_build, use_older_build
from layout_samples import LAYOUTS, tiles
from ottava.kernels import reference
from ottava.kernels.native import stochastic as native_stochastic
from ottava.kernels.native.build import Built
from ottava.numerics.formats import BF16, E2M1, E2M3, E3M2, E4M3, E4M3FNUZ, E5M2, E5M2FNUZ, Format
from ottava.numerics.rounding import decode
from ottava.numerics.scaling import BLOCK_1X16, Granularity
from ottava.numerics.tensor import QuantizationSpec
from ottava.ops.quantize import explain_quantize, quantize
from sweep import sweep

SMALL = (E4M3, E5M2, E2M1, E2M3, E3M2, E4M3FNUZ, E5M2FNUZ)
STOCHASTIC = QuantizationSpec(E2M1, BLOCK_1X16, "e4m3", rounding="stochastic")
needs_library = pytest.mark.skipif(bool(native_stochastic.built().reason), reason=native_stochastic.built().reason)


def assert_same(x: Tensor, spec: QuantizationSpec, scale: Tensor | None = None, seed: int = 0) -> None:
    """Codes (those of NaN too), scales and amax; NaN equals NaN."""
    assert native_stochastic.supports_quantize(x, spec, scale) is None
    torch.manual_seed(seed)
    ours = native_stochastic.quantize(x, spec, scale)
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
@sweep(fmt=SMALL, scale=[1.0, 0.37, 2.0**-120, 3e38])
def test_every_16_bit_number_is_cast_as_the_reference_does(fmt: Format, dtype: torch.dtype, scale: float) -> None:
    """Subnormals, saturation and NaN; for fp32, the same patterns as its upper half."""
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16)
    x = patterns.view(torch.bfloat16).float() if dtype == torch.float32 else patterns.view(dtype)
    for scaling in ("delayed", "guarded"):
        spec = QuantizationSpec(fmt, scaling=scaling, rounding="stochastic")  # type: ignore[arg-type]
        assert_same(x.view(64, 1024), spec, torch.tensor(scale), seed=11)


@needs_library
@sweep(granularity=["tensor", "row", "1x16", "*x1", "128x128"])
def test_threads_change_no_bit(granularity: str) -> None:
    """One, two, and more than there are cores; sizes that do not divide."""
    x, spec = tiles(700, 333, torch.bfloat16), QuantizationSpec(E2M1, Granularity.parse(granularity))
    spec = replace(spec, rounding="stochastic")
    codes = []
    for threads in (1, 2, 5):
        torch.manual_seed(0)
        torch.set_num_threads(threads)
        try:
            codes.append(native_stochastic.quantize(x, spec).data)
        finally:
            torch.set_num_threads(1)
    assert torch.equal(codes[0], codes[1])
    assert torch.equal(codes[0], codes[2])


@needs_library
@for_each_older_build
def test_instruction_sets_change_no_bit(
    flags: tuple[str, ...], dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three older builds against the reference; the default build is what all other tests run."""
    use_older_build(native_stochastic, "stochastic.cpp", flags, dtype, tmp_path, monkeypatch)
    x = tiles(140, 300, dtype)
    x[0, 5], x[3, 7] = math.inf, math.nan
    for fmt in SMALL:
        assert_same(x, QuantizationSpec(fmt, BLOCK_1X16, rounding="stochastic"))


@needs_library
@sweep(rule=["unclipped", "four_over_six"])
def test_rules_for_block_scales_give_the_references_bits(rule: str, dtype: torch.dtype) -> None:
    """Which torch applies; zeros, infinities and NaN are among the numbers."""
    x = tiles(37, 131, dtype)
    x[0, 5], x[30, 30], x[6], x[8:24, :16] = math.inf, math.nan, 0.0, 0.0
    for matrix in (x, x.t()):
        assert_same(matrix, replace(STOCHASTIC, block_scale=rule), seed=4)


@needs_library
@sweep(fmt=SMALL)
def test_the_mean_is_the_number(fmt: Format) -> None:
    """Within 5 standard errors, from a 16th of the smallest number of the format to its largest."""
    draws = 1 << 14
    x = torch.logspace(math.log2(fmt.min_subnormal / 16), math.log2(fmt.max * 0.99), 64, base=2.0)
    x = torch.cat([x, -x]).expand(draws, -1)
    x_q = quantize(x, QuantizationSpec(fmt, scaling="delayed", rounding="stochastic"), scale=torch.tensor(1.0))
    assert explain_quantize(x, x_q.spec).endswith("native_stochastic: runs")
    y = decode(x_q.data, fmt).double()
    error = y.std(0) / math.sqrt(draws)
    assert ((y.mean(0) - x[0].double()).abs() <= 5 * error + 2.0**-24 * fmt.max).all()


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


@needs_library
def test_compiled_code_draws_what_eager_code_draws() -> None:
    """The cast is one operator there."""

    def step(x: Tensor) -> Tensor:
        return quantize(x, STOCHASTIC).data

    x = torch.randn(32, 64)
    torch.manual_seed(5)
    eager = step(x)
    torch.manual_seed(5)
    assert torch.equal(torch.compile(step, backend="aot_eager")(x), eager)


def test_what_it_cannot_cast_it_refuses() -> None:
    """With the reason."""
    x = torch.ones(2, 2)
    assert native_stochastic.supports_quantize(x, QuantizationSpec(E4M3)) == (
        "native_stochastic: rounds stochastically; got nearest_even"
    )
    bf16 = QuantizationSpec(BF16, rounding="stochastic")
    assert "signed formats of at most 8 bits; got BF16" in str(native_stochastic.supports_quantize(x, bf16))
    meta = native_stochastic.supports_quantize(torch.ones(2, 2, device="meta"), STOCHASTIC)
    assert meta == "native_stochastic: runs on a cpu; got meta"
    with FakeTensorMode():
        assert "takes plain tensors" in str(native_stochastic.supports_quantize(torch.ones(2, 2), STOCHASTIC))


def test_without_a_library_the_reference_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits; the reason is in the explanation."""
    x = torch.randn(40, 300)
    torch.manual_seed(2)
    before = quantize(x, STOCHASTIC)
    monkeypatch.setattr(native_stochastic, "built", lambda *_: Built(None, "no C++ compiler"))
    lines = explain_quantize(x, STOCHASTIC).split("\n")
    assert (lines[1], lines[-1]) == ("native_stochastic: no C++ compiler", "reference: runs")
    torch.manual_seed(2)
    assert torch.equal(quantize(x, STOCHASTIC).data, before.data)
