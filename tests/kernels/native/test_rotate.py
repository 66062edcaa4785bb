"""The bits of `transforms.Hadamard` for every size, dtype and layout, on any number of threads."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels.native.older_builds import for_each_older_build, take_library, use_older_build
from layout_samples import LAYOUTS, tiles
from ottava.kernels.native import build as native_build
from ottava.kernels.native import quantize as native_quantize
from ottava.numerics.transforms import Hadamard, Mean
from ottava.ops.quantize import explain_quantize, quantize
from ottava.recipe import RECIPES
from sweep import sweep

ROTATIONS = (
    Hadamard(),
    Hadamard(128, "fresh", rounded=False),
    Hadamard(2, 3),
    Hadamard(512, "fresh"),
    Hadamard(16, 7, rounded=False),
)
REASON = native_build.load("rotate").reason
needs_library = pytest.mark.skipif(bool(REASON), reason=REASON)


def assert_same(x: Tensor, rotation: Hadamard) -> None:
    """Dtype, shape and bits; NaN equals NaN. -0 never comes out."""
    assert native_quantize.supports_transform(x, rotation) is None
    aside = rotation.prepare(x, None)
    ours, truth = native_quantize.plan_transform(x, rotation)(x, aside), rotation.apply(x, aside)
    assert (ours.dtype, ours.shape, ours.stride()) == (truth.dtype, truth.shape, truth.stride())
    bits = torch.int16 if ours.dtype == torch.bfloat16 else torch.int32
    lost = truth.isnan()
    assert torch.equal(ours.isnan(), lost)
    assert torch.equal(ours.view(bits).masked_fill(lost, 0), truth.view(bits).masked_fill(lost, 0)), rotation
    assert not (torch.signbit(ours) & (ours == 0)).any()


@needs_library
@sweep(rotation=ROTATIONS)
def test_every_layout_gives_the_bits_of_the_definition(rotation: Hadamard, dtype: torch.dtype) -> None:
    """Numbers that fp64 sums exactly and others; zeros of both signs, infinities, NaN."""
    for make in LAYOUTS.values():
        if (x := make(dtype)).numel():
            assert_same(x, rotation)
            assert_same(x.t(), rotation)
    x = torch.randn(21, 260).mul(torch.exp2(torch.randint(-60, 60, (21, 260)).float())).to(dtype)
    x[0, 5], x[3, 7], x[3, 9], x[5, 5], x[6], x[7] = math.inf, math.inf, -math.inf, math.nan, 0.0, -0.0
    for layout in (x, x.t().contiguous().t(), x[:, 3:250], x[::2, ::3]):
        assert_same(layout, rotation)


@needs_library
def test_threads_change_no_bit() -> None:
    """One, two, and more than there are cores; sizes that do not divide."""
    x, turned = tiles(700, 333, torch.bfloat16), []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        turned.append(native_quantize.plan_transform(x, ROTATIONS[0])(x, None))
    assert torch.equal(turned[0], turned[1])
    assert torch.equal(turned[0], turned[2])


@needs_library
@for_each_older_build
def test_instruction_sets_change_no_bit(
    flags: tuple[str, ...], dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three older builds against the definition; the default build is what all other tests run."""
    use_older_build("rotate", flags, dtype, tmp_path, monkeypatch)
    for rotation in ROTATIONS:
        assert_same(tiles(140, 300, dtype), rotation)
        assert_same(tiles(140, 300, dtype).t(), rotation)


def test_what_it_cannot_turn_it_refuses() -> None:
    """With the reason."""
    for x, transform, message in (
        (torch.ones(2, 2), Mean(), "rotates; got mean"),
        (torch.ones(2, 2, device="meta"), Hadamard(), "runs on a cpu; got meta"),
        (torch.ones(2, 2, dtype=torch.float64), Hadamard(), "got torch.float64"),
        (torch.ones(0, 2), Hadamard(), "rotates a matrix with elements; got (0, 2)"),
    ):
        assert message in str(native_quantize.supports_transform(x, transform))


@needs_library
def test_the_explanation_names_what_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """And without a library, why torch does; with the same bits."""
    x, spec = torch.randn(40, 300).bfloat16(), RECIPES["four_over_six"].wgrad.rhs
    assert spec is not None
    before = quantize(x, spec)
    assert explain_quantize(x, spec) == "hadamard 16 (native_quantize) before a cast: runs"
    take_library("rotate", monkeypatch)
    lines = ["native_quantize: no C++ compiler", "hadamard 16 before a cast: runs"]
    assert explain_quantize(x, spec).split("\n") == lines
    assert torch.equal(quantize(x, spec).data, before.data)
