"""Number formats as data: a `Format` stores eight facts, and every other number about it is derived.

A code (an unsigned integer of `bits` bits) is sign | exponent | mantissa, and stands for

    (-1)**sign * 2**(exponent - bias) * (1 + mantissa / 2**mantissa_bits)      exponent field > 0: normal
    (-1)**sign * 2**(1 - bias)        * (0 + mantissa / 2**mantissa_bits)      exponent field = 0: zero, subnormal

unless `specials` reserves it for infinity or NaN. A new format is one entry at the end of this file; tables, rounding,
scaling, recipes and tests then use it. Rounding and casts live in `rounding`, scales in `scaling`.

Sources: OCP 8-bit Floating Point Specification (OFP8) v1.0; OCP Microscaling Formats (MX) v1.0; IEEE 754-2019.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import torch

from ottava.base.errors import RefusesUnknownFields, unknown_name

Specials = Literal["ieee", "fn", "fnuz", "none"]


@dataclass(frozen=True, kw_only=True)
class Format(RefusesUnknownFields):
    """A binary floating-point format. Equal facts, equal formats; hashable.

    Raises:
        ValueError: a width is negative or the format would hold no code.

    Example:
        >>> E4M3.max, E4M3.min_normal, E4M3.min_subnormal, E4M3.eps
        (448.0, 0.015625, 0.001953125, 0.125)
        >>> E8M0.max == 2.0**127, E2M1.max
        (True, 6.0)
    """

    name: str
    """The field's name for it: E4M3."""
    exponent_bits: int
    """Width of the exponent field."""
    mantissa_bits: int
    """Width of the stored mantissa, without the implied one."""
    bias: int
    """Subtracted from the exponent field."""
    specials: Specials
    """"ieee": the top exponent is infinity and NaN. "fn": one NaN (all ones), no infinity. "fnuz": one NaN in
    the place of -0, which does not exist, no infinity. "none": only numbers."""
    signed: bool = True
    """False for pure scales (E8M0)."""
    has_zero: bool = True
    """False where exponent field 0 is an ordinary power of two (E8M0): then there are no subnormals either."""
    dtype: torch.dtype | None = None
    """torch's storage type; None: torch has none, and each code takes a byte of uint8."""

    def __post_init__(self) -> None:
        if self.exponent_bits < 1 or self.mantissa_bits < 0:
            raise ValueError(
                f"format {self.name!r}: {self.exponent_bits} exponent and {self.mantissa_bits} mantissa bits; "
                f"at least 1 and 0 are needed"
            )

    def __hash__(self) -> int:
        return hash(self.name)  # short: every call of a kernel looks up its format

    @functools.cached_property
    def bits(self) -> int:
        """Width of a code, the sign included."""
        return int(self.signed) + self.exponent_bits + self.mantissa_bits

    @functools.cached_property
    def storage_dtype(self) -> torch.dtype:
        """The dtype of codes in memory: the torch type, or uint8 with one code in each byte."""
        return self.dtype or torch.uint8

    @functools.cached_property
    def emax(self) -> int:
        """Exponent of the largest number."""
        top = (1 << self.exponent_bits) - 1
        # "ieee" reserves the whole top exponent; "fn" only its last mantissa, so all of it if there is no mantissa
        reserved = self.specials == "ieee" or (self.specials == "fn" and self.mantissa_bits == 0)
        return top - int(reserved) - self.bias

    @functools.cached_property
    def emin(self) -> int:
        """Exponent of the smallest normal number."""
        return int(self.has_zero) - self.bias

    @functools.cached_property
    def max(self) -> float:
        """Largest finite number."""
        last = 2 if self.specials == "fn" and self.mantissa_bits > 0 else 1  # "fn" spends the last mantissa on NaN
        return math.ldexp(2 - last * self.eps, self.emax)

    @functools.cached_property
    def clip(self) -> float:
        """The magnitude at which clipping begins, half a step above the largest number. See `tie_clips`."""
        return self.max + math.ldexp(self.eps, self.emax) / 2

    @functools.cached_property
    def tie_clips(self) -> bool:
        """Whether a cast clips `clip` itself: a tie goes to the even neighbour, which may lie beyond the format."""
        return self.max / math.ldexp(self.eps, self.emax) % 2 != 0

    def clips(self, magnitude: Any, scale_inv: Any = 1.0) -> Any:
        """Whether rounding to nearest even clips a magnitude in units of scale_inv: floats, arrays or tensors.

        Example:
            >>> E4M3.clips(464.0), E4M3.clips(465.0), E5M2.clip, E5M2.clips(61440.0)
            (False, True, 61440.0, True)
        """
        end = self.clip * scale_inv
        return magnitude >= end if self.tie_clips else magnitude > end

    @functools.cached_property
    def lowest(self) -> float:
        """Smallest number of all: -max with a sign bit, else 0 or the smallest positive number."""
        if self.signed:
            return -self.max
        return 0.0 if self.has_zero else self.min_normal

    @functools.cached_property
    def min_normal(self) -> float:
        """Smallest positive number with full precision."""
        return math.ldexp(1.0, self.emin)

    @functools.cached_property
    def min_subnormal(self) -> float:
        """Smallest positive number."""
        return self.min_normal * self.eps if self.has_zero else self.min_normal

    @functools.cached_property
    def eps(self) -> float:
        """Distance from 1 to the next number. Rounding to nearest errs by at most eps / 2, relatively."""
        return math.ldexp(1.0, -self.mantissa_bits)

    @functools.cached_property
    def has_infinity(self) -> bool:
        """Whether some code is infinity."""
        return self.specials == "ieee"

    @functools.cached_property
    def has_nan(self) -> bool:
        """Whether some code is NaN."""
        return self.specials != "none"

    @functools.cached_property
    def has_negative_zero(self) -> bool:
        """Whether the sign bit alone makes a code; "fnuz" spends that one on NaN, and -0 becomes 0."""
        return self.signed and self.has_zero and self.specials != "fnuz"

    @functools.cached_property
    def range_bits(self) -> float:
        """log2(max / min_subnormal): the number of octaves."""
        return math.log2(self.max) - math.log2(self.min_subnormal)

    def __str__(self) -> str:
        return self.name


E4M3 = Format(name="E4M3", exponent_bits=4, mantissa_bits=3, bias=7, specials="fn", dtype=torch.float8_e4m3fn)
"""OCP's FP8 format for activations and weights: up to 448, without infinities."""
E5M2 = Format(name="E5M2", exponent_bits=5, mantissa_bits=2, bias=15, specials="ieee", dtype=torch.float8_e5m2)
"""OCP's FP8 format for gradients: up to 57,344, with infinities."""
# AMD's MI300: a bias more, so half the largest number of the OCP format and half its smallest
E4M3FNUZ = Format(
    name="E4M3FNUZ", exponent_bits=4, mantissa_bits=3, bias=8, specials="fnuz", dtype=torch.float8_e4m3fnuz
)
E5M2FNUZ = Format(
    name="E5M2FNUZ", exponent_bits=5, mantissa_bits=2, bias=16, specials="fnuz", dtype=torch.float8_e5m2fnuz
)
E8M0 = Format(
    name="E8M0",
    exponent_bits=8,
    mantissa_bits=0,
    bias=127,
    specials="fn",
    signed=False,
    has_zero=False,
    dtype=torch.float8_e8m0fnu,
)
"""OCP's format of a block's scale: a power of two."""
E2M1 = Format(name="E2M1", exponent_bits=2, mantissa_bits=1, bias=1, specials="none")
"""OCP's FP4 format: 0.5 to 6 in eight magnitudes with zero."""
E2M3 = Format(name="E2M3", exponent_bits=2, mantissa_bits=3, bias=1, specials="none")
E3M2 = Format(name="E3M2", exponent_bits=3, mantissa_bits=2, bias=3, specials="none")
BF16 = Format(name="BF16", exponent_bits=8, mantissa_bits=7, bias=127, specials="ieee", dtype=torch.bfloat16)
FP16 = Format(name="FP16", exponent_bits=5, mantissa_bits=10, bias=15, specials="ieee", dtype=torch.float16)
FP32 = Format(name="FP32", exponent_bits=8, mantissa_bits=23, bias=127, specials="ieee", dtype=torch.float32)

FORMATS: Mapping[str, Format] = MappingProxyType(
    {fmt.name: fmt for fmt in (E4M3, E5M2, E4M3FNUZ, E5M2FNUZ, E8M0, E2M1, E2M3, E3M2, BF16, FP16, FP32)}
)


def dtype_name(dtype: object) -> str:
    """ "bfloat16" for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def get_format(name: str | Format) -> Format:
    """The registered format of that name, in any case; a Format passes through.

    Raises:
        ValueError: unknown name; the message gives the nearest known one.  TypeError: neither a name nor a Format.
    """
    if isinstance(name, Format):
        return name
    if not isinstance(name, str):
        raise TypeError(f"format: got {name!r}; needs a Format or the name of one")
    if name.upper() not in FORMATS:
        raise ValueError(unknown_name("format", name, FORMATS))
    return FORMATS[name.upper()]
