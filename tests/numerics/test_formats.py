"""Derived numbers against what the standards print, and against ml_dtypes, gfloat and torch."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from ottava.numerics.formats import E4M3, E8M0, FORMATS, FP32, Format, get_format
from ottava.numerics.rounding import code_values, round_to_format
from sweep import sweep

# bits, max, smallest normal, smallest number, distance from 1 to the next, as OFP8 v1.0, OCP MX v1.0 and IEEE 754-2019
# print them
PUBLISHED = {
    "E4M3": (8, 448.0, 2.0**-6, 2.0**-9, 2.0**-3),
    "E5M2": (8, 57344.0, 2.0**-14, 2.0**-16, 2.0**-2),
    "E4M3FNUZ": (8, 240.0, 2.0**-7, 2.0**-10, 2.0**-3),
    "E5M2FNUZ": (8, 57344.0, 2.0**-15, 2.0**-17, 2.0**-2),
    "E8M0": (8, 2.0**127, 2.0**-127, 2.0**-127, 1.0),
    "E2M1": (4, 6.0, 1.0, 0.5, 0.5),
    "E2M3": (6, 7.5, 1.0, 0.125, 2.0**-3),
    "E3M2": (6, 28.0, 0.25, 0.0625, 2.0**-2),
    "BF16": (16, 255 * 2.0**120, 2.0**-126, 2.0**-133, 2.0**-7),
    "FP16": (16, 65504.0, 2.0**-14, 2.0**-24, 2.0**-10),
    "FP32": (32, (2 - 2.0**-23) * 2.0**127, 2.0**-126, 2.0**-149, 2.0**-23),
}


@sweep
def test_derived_numbers_are_the_published_ones(fmt: Format) -> None:
    """E4M3: 1.75 * 2**8 = 448 and not 480, for the code of 480 is the NaN."""
    assert (fmt.bits, fmt.max, fmt.min_normal, fmt.min_subnormal, fmt.eps) == PUBLISHED[fmt.name]
    assert math.floor(math.log2(fmt.max)) == fmt.emax
    assert math.log2(fmt.min_normal) == fmt.emin


@sweep
def test_clipping_begins_where_a_cast_no_longer_rounds_to_the_largest_number(fmt: Format) -> None:
    """Both sides of the tie, and the tie, cast to the same format with a bit more of exponent, which goes on."""
    wider = replace(fmt, name="wider", exponent_bits=fmt.exponent_bits + 1, specials="none", dtype=None)
    if fmt == FP32:
        assert fmt.clip == 2.0**128 * (1 - 2.0**-25)  # no number of fp32: nothing to cast
        return
    tie = torch.tensor([fmt.clip])
    infinity = torch.tensor([math.inf])
    for x, clips in ((tie.nextafter(-infinity), False), (tie, fmt.tie_clips), (tie.nextafter(infinity), True)):
        assert (round_to_format(x, wider).item() > fmt.max) == clips
        assert fmt.clips(x).item() == fmt.clips(x.item()) == clips
        assert round_to_format(x, fmt).item() == fmt.max
        if fmt.has_infinity:
            assert x.to(fmt.dtype).isinf().item() == clips


@sweep
def test_ml_dtypes_agrees(fmt: Format, ml_dtypes_type: Any) -> None:
    """The same numbers in Google's package. Its E8M0 counts 2**-127 as the smallest normal, as ottava does."""
    info = ml_dtypes.finfo(ml_dtypes_type)
    theirs = (float(info.max), float(info.smallest_normal), float(info.smallest_subnormal), float(info.eps))
    assert (fmt.max, fmt.min_normal, fmt.min_subnormal, fmt.eps) == theirs
    assert (fmt.bits, fmt.mantissa_bits) == (info.bits, info.nmant)


@sweep
def test_gfloat_agrees(fmt: Format, gfloat_info: Any) -> None:
    """The same facts in Graphcore's package."""
    assert (fmt.bits, fmt.max, fmt.min_normal) == (gfloat_info.bits, gfloat_info.max, gfloat_info.smallest_normal)
    assert (fmt.bias, fmt.emax, fmt.exponent_bits) == (gfloat_info.bias, gfloat_info.emax, gfloat_info.expBits)
    assert fmt.has_infinity == (gfloat_info.num_infs > 0)
    assert fmt.has_nan == (gfloat_info.num_nans > 0)
    assert (fmt.signed, fmt.has_zero) == (gfloat_info.is_signed, gfloat_info.has_zero)


@sweep
def test_torch_agrees(fmt: Format) -> None:
    """Storage types hold a code each; torch's finfo prints the same numbers where torch has the type."""
    assert fmt.storage_dtype.itemsize * 8 == max(fmt.bits, 8)
    if fmt.dtype is None:
        assert fmt.storage_dtype == torch.uint8
        return
    info = torch.finfo(fmt.dtype)
    # torch knows no subnormals for E8M0 and calls its eps 1; its eps of float8_e5m2fnuz is half of what its codes say
    eps = info.eps * 2 if fmt.name == "E5M2FNUZ" else info.eps
    assert (fmt.bits, fmt.max, fmt.min_normal, fmt.eps) == (info.bits, info.max, info.smallest_normal, eps)


@sweep
def test_extremes_are_the_extremes_of_all_codes(fmt: Format) -> None:
    """max, lowest and min_subnormal are the largest, the smallest and the smallest positive of all finite codes."""
    if fmt == FP32:
        values = np.array([np.finfo(np.float32).max, np.finfo(np.float32).min, np.finfo(np.float32).smallest_subnormal])
    else:
        values = code_values(fmt).numpy()
    finite = values[np.isfinite(values)]
    assert (finite.max(), finite.min(), finite[finite > 0].min()) == (fmt.max, fmt.lowest, fmt.min_subnormal)
    assert fmt.range_bits == pytest.approx(math.log2(fmt.max / fmt.min_subnormal))


@pytest.mark.parametrize("field", [field.name for field in fields(Format)])
def test_every_fact_counts_in_a_comparison(field: str) -> None:
    """Two formats that differ in one fact are two formats."""
    other: dict[str, Any] = {"name": "X", "specials": "none", "signed": False, "has_zero": False, "dtype": None}
    changed = replace(E4M3, **{field: other.get(field, 9)})
    assert changed != E4M3
    assert replace(changed, **{field: getattr(E4M3, field)}) == E4M3
    assert hash(replace(E4M3)) == hash(E4M3)


def test_formats_are_frozen_and_so_is_their_register() -> None:
    """Nobody changes E4M3 for all others."""
    with pytest.raises(FrozenInstanceError):
        E4M3.bias = 8  # type: ignore[misc]
    with pytest.raises(TypeError):
        FORMATS["E4M3"] = E8M0  # type: ignore[index]


@sweep
def test_names_are_unique_and_find_their_format(fmt: Format) -> None:
    """By name in any case, or as themselves."""
    assert get_format(fmt.name) is get_format(fmt.name.lower()) is get_format(fmt) is fmt
    assert str(fmt) == fmt.name


def test_unknown_names_are_refused_with_the_nearest() -> None:
    """E4M4 is a slip for E4M3; 8 is no name at all; a misspelt fact is refused with the nearest."""
    for name in ("E4M4", "e4m4"):
        with pytest.raises(ValueError, match=f"unknown format '{name}'; did you mean 'E4M3'"):
            get_format(name)
    with pytest.raises(TypeError, match="got 8"):
        get_format(8)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="did you mean 'mantissa_bits'"):
        Format(name="X", exponent_bits=4, mantisa_bits=3, bias=7, specials="fn")  # type: ignore[call-arg]


def test_formats_that_nobody_has_registered_follow_the_definition() -> None:
    """The narrowest widths, each kind of specials, and an unsigned format with a zero, worked out by hand."""
    narrow = Format(
        name="N", exponent_bits=1, mantissa_bits=1, bias=0, specials="none"
    )  # 0, 1, 2, 3 and their negatives
    assert code_values(narrow).tolist() == [0, 1, 2, 3, -0.0, -1, -2, -3]
    assert (narrow.lowest, narrow.max, narrow.clip, narrow.tie_clips) == (-3, 3, 3.5, True)
    fn = Format(name="F", exponent_bits=2, mantissa_bits=1, bias=1, specials="fn")  # the code of 6 is the NaN
    assert (fn.max, fn.clip, fn.tie_clips, fn.has_nan, fn.has_infinity) == (4, 5, False, True, False)
    unsigned = replace(narrow, name="U", signed=False)
    assert (unsigned.bits, unsigned.lowest, code_values(unsigned).tolist()) == (2, 0, [0, 1, 2, 3])
    assert replace(E8M0, exponent_bits=2, bias=1).lowest == 0.5


def test_clipping_scales_with_the_block() -> None:
    """E4M3 with scale_inv 4 clips what is above 464 * 4."""
    assert [E4M3.clips(x, 4.0) for x in (1856.0, 1857.0)] == [False, True]
    assert E4M3.clips(torch.tensor([464.0, 465.0]), torch.tensor([0.5, 2.0])).tolist() == [True, False]


def test_facts_are_given_by_name() -> None:
    """Three integers in a row are easily exchanged."""
    with pytest.raises(TypeError, match="positional"):
        Format("X", 4, 3, 7, "fn")  # type: ignore[misc]


@pytest.mark.parametrize("exponent_bits, mantissa_bits", [(0, 3), (-1, 3), (4, -1)])
def test_impossible_widths_are_refused(exponent_bits: int, mantissa_bits: int) -> None:
    """A floating-point number has an exponent."""
    with pytest.raises(ValueError, match="at least 1 and 0 are needed"):
        Format(name="X", exponent_bits=exponent_bits, mantissa_bits=mantissa_bits, bias=1, specials="none")
