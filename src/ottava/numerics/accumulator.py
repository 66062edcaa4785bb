"""Accumulators as data: how a tensor core adds the products of a GEMM. A new profile is one entry in `ACCUMULATORS`.

A tensor core does not sum in fp32. It takes a group of products along K together with the accumulator so far, aligns
all of them to the largest exponent E, cuts each one off `fraction_bits` below it, and adds these integers exactly:

    E    = max of ea + eb over products that are not zero, and of the accumulator's exponent if that is not zero
    s    = sum of trunc(product * 2**(fraction_bits - E)), the accumulator included
    next = s * 2**(E - fraction_bits), with `kept_bits` bits after the leading one

ea and eb are the exponents of the operands, those of subnormal numbers the smallest normal exponent of their format.
The last group of an operand is filled with zeros. Groups are chained: the result of one is a term of the next. With a
`promotion`, a chain ends after so many products; its result is added to an fp32 number, rounded to nearest, and the
next chain starts at zero.

Instructions of Blackwell scale blocks themselves (`scales_blocks`). A product is then one of scaled numbers, and the
exponents of both scales count, so chains go on over blocks. With a `dot` above 1 so many products are summed exactly
first; such a sum is one term, and its exponent is that of its two scales, also where it is zero.

Cutting off pulls every sum toward zero, so over a long K the error is a bias, not noise.

Sources: results of H100, H200, L40S and B200 in the validation data of MATLAB-tensor-core (Khattak and Mikaitis,
"Accurate Models of NVIDIA Tensor Cores"); for tcgen05 MMA-Sim (Xie et al., arXiv 2511.10909). docs/accumulation.md
says which profile was confirmed by which results.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, Literal, get_args

from ottava.base.errors import RefusesUnknownFields, need_known, need_type

Rounding = Literal["truncate", "nearest_even"]
_BITS = (("fraction_bits", 1, 29), ("kept_bits", 1, 23))  # C++ sums at least one product in 32 bits; fp32 keeps 23
_DOT_BITS = 35  # terms of dots are summed in fp64
_LONGEST = 4096
_PRODUCT_EPS = 2.0**-6  # the last bit of a product of two E4M3 numbers, of the leading one
_HALF_CUT = 1.27  # the unit, in rms of the products, at which half of a product is cut off: of |N(0, 1)| x |N(0, 1)|


@dataclass(frozen=True, kw_only=True)
class Accumulator(RefusesUnknownFields):
    """How products are summed along K. Frozen, hashable, compared by every field.

    Raises:
        TypeError: unknown field, or a value of another type.  ValueError: a number without a meaning.

    Example:
        >>> ACCUMULATORS["hopper"].group, ACCUMULATORS["hopper"].fraction_bits, ACCUMULATORS["hopper"].promotion
        (32, 13, None)
        >>> import dataclasses
        >>> str(dataclasses.replace(ACCUMULATORS["hopper"], name="mine", promotion=64))
        'mine: groups of 32, 13 bits after the leading one, truncated; promoted to fp32 every 64'
    """

    name: str
    """Its name in receipts and recipes."""
    group: int | None = None
    """Products that are aligned and summed at once; None: fp32 sums in the order of the kernel that runs."""
    fraction_bits: int = 23
    """Bits of an aligned term below the largest exponent; the term is truncated to them, toward zero."""
    kept_bits: int = 23
    """Bits after the leading one that the sum of a group keeps."""
    rounding: Rounding = "truncate"
    """How the sum of a group comes to `kept_bits`: toward zero, or to nearest."""
    promotion: int | None = None
    """Products in a chain whose sum is added to an fp32 number, to nearest; None: the chain ends with K."""
    scales_blocks: bool = False
    """Whether the instruction scales blocks itself (E8M0 and E4M3 scales), and takes 4, 6 and 8 bits side by side."""
    dot: int = 1
    """Products that are summed exactly before they are aligned, all below the same two scales."""
    fp4: str = ""
    """Name of the profile of the instruction for pairs of E2M1 whose blocks are scaled; "": this one."""
    confirmed: bool = True
    """Whether results of real cards equal this profile bit for bit."""
    source: str = ""
    """Card and instruction, and where the facts come from."""
    key: str = field(init=False, repr=False, compare=False)
    """The profile as one string, because torch custom operators take no dataclass."""

    def __post_init__(self) -> None:
        need_type("Accumulator: name", self.name, str)
        if not self.name or "/" in self.name:
            raise ValueError(f"Accumulator: name is {self.name!r}; needs a word without a slash, for receipts")
        need_known("Accumulator", "rounding", self.rounding, get_args(Rounding))
        need_type("Accumulator: dot", self.dot, int)
        if self.dot < 1 or (self.dot > 1 and (not self.scales_blocks or not self.group or self.group % self.dot)):
            raise ValueError(
                f"Accumulator: dot is {self.dot}; needs 1, or with scales_blocks a divisor of the group, {self.group}"
            )
        need_type("Accumulator: scales_blocks", self.scales_blocks, bool)
        need_type("Accumulator: fp4", self.fp4, str)
        for name, low, high in _BITS:
            need_type(f"Accumulator: {name}", getattr(self, name), int)
            high = _DOT_BITS if self.dot > 1 and name == "fraction_bits" else high
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"Accumulator: {name} is {getattr(self, name)}; needs {low} to {high} bits")
        for name in ("group", "promotion"):
            if getattr(self, name) is not None:
                need_type(f"Accumulator: {name}", getattr(self, name), int)
        if self.group is not None and not 1 <= self.group <= _LONGEST:
            raise ValueError(f"Accumulator: group is {self.group}; needs 1 to {_LONGEST} products")
        if self.promotion is not None and (self.group is None or self.promotion < 1 or self.promotion % self.group):
            raise ValueError(
                f"Accumulator: promotion is {self.promotion}; needs a multiple of the group, which is {self.group}"
            )
        settings = {f.name: getattr(self, f.name) for f in fields(self) if f.init}
        object.__setattr__(self, "key", json.dumps(settings, sort_keys=True))

    @property
    def emulated(self) -> bool:
        """Whether sums follow a tensor core's rule; False: they are fp32."""
        return self.group is not None

    def __str__(self) -> str:
        if self.group is None:
            return f"{self.name}: fp32 sums"
        cut = "truncated" if self.rounding == "truncate" else "rounded to nearest"
        text = f"{self.name}: groups of {self.group}, {self.kept_bits} bits after the leading one, {cut}"
        text += f"; terms cut off at {self.fraction_bits} bits" if self.fraction_bits != self.kept_bits else ""
        text += f"; sums of {self.dot} exact" if self.dot > 1 else ""
        return text + (f"; promoted to fp32 every {self.promotion}" if self.promotion else "")

    def to_dict(self) -> dict[str, Any] | str:
        """Plain JSON and YAML values: the name of a registered profile, else its fields."""
        if ACCUMULATORS.get(self.name) == self:
            return self.name
        return {f.name: getattr(self, f.name) for f in fields(self) if f.init and getattr(self, f.name) != f.default}


_CARDS = "results of real cards (MATLAB-tensor-core)"
_SIMULATED = "unconfirmed: results of MMA-Sim; none of a card was at hand"

ACCUMULATORS: Mapping[str, Accumulator] = MappingProxyType(
    {
        profile.name: profile
        for profile in (
            Accumulator(name="fp32", source="no tensor core: the sums of ottava's own kernels"),
            # cuBLASLt's fast accumulation: one chain over all of K
            Accumulator(
                name="hopper", group=32, fraction_bits=13, kept_bits=13, source=f"FP8 on H100 and H200; {_CARDS}"
            ),
            # slow accumulation of cuBLASLt and CUTLASS, DeepGEMM: fp32 registers take over every 128 products
            Accumulator(
                name="hopper_promoted",
                group=32,
                fraction_bits=13,
                kept_bits=13,
                promotion=128,
                source="FP8 on H100 and H200, slow accumulation; the rule of CUTLASS and DeepGEMM on that of hopper",
            ),
            Accumulator(
                name="ada",
                group=16,
                fraction_bits=13,
                kept_bits=13,
                source=f"FP8 mma.sync on L40S and others; {_CARDS}",
            ),
            # the products of an instruction are summed from zero, and C is added to that in fp32: so C never is a term
            Accumulator(
                name="blackwell_mma",
                group=32,
                fraction_bits=25,
                promotion=32,
                source=f"FP8 mma.sync on B200; {_CARDS}",
            ),
            # kinds f8f6f4 and mxf8f6f4
            Accumulator(
                name="tcgen05",
                group=32,
                fraction_bits=25,
                scales_blocks=True,
                fp4="tcgen05_fp4",
                confirmed=False,
                source=f"tcgen05.mma on B200 on operands of 4 to 8 bits; {_SIMULATED}",
            ),
            # kind mxf4nvf4: four exact sums of 16 products and the accumulator
            Accumulator(
                name="tcgen05_fp4",
                group=64,
                dot=16,
                fraction_bits=35,
                scales_blocks=True,
                confirmed=False,
                source=f"tcgen05.mma on B200 on MXFP4 and NVFP4; {_SIMULATED}",
            ),
        )
    }
)
"""The registered profiles, by name."""


def get_accumulator(accumulator: Accumulator | str | Mapping[str, Any]) -> Accumulator:
    """The registered profile of that name; an Accumulator passes through, a mapping gives its fields.

    Raises:
        ValueError: unknown name (the message gives the nearest known one), or a value that `Accumulator` refuses.
        TypeError: neither of them, or an unknown field.
    """
    if isinstance(accumulator, Accumulator):
        return accumulator
    if isinstance(accumulator, Mapping):
        return Accumulator(**accumulator)
    if not isinstance(accumulator, str):
        raise TypeError(f"accumulator: got {accumulator!r}; needs an Accumulator or the name of one")
    need_known("", "accumulator", accumulator, ACCUMULATORS)
    return ACCUMULATORS[accumulator]


def lost_share(k: int, alignment: float, accumulator: Accumulator | str) -> float:
    """About what share of its magnitude a sum of k products loses under a profile, because terms are cut off.

    Args:
        alignment: mean of the products over that of their magnitudes' squares, rooted: the cosine of the two rows. For
            independent operands it is the product of their `bias` (|mean| / rms).
    Edge cases: right for numbers of one sign (tests hold 15 %), up to 2.5 times too large for others, because products
        of few bits have nothing to cut off for a while.

    Example:
        >>> f"{lost_share(4096, 2 / 3.14159, 'hopper'):.3f}"                       # magnitudes of normal numbers
        '0.071'
        >>> lost_share(4096, 0.0, "hopper")
        0.0
    """
    rule = get_accumulator(accumulator)
    length, steps = k if rule.promotion is None else min(k, rule.promotion), 64
    if rule.group is None or not length or rule.group == rule.promotion:
        return 0.0
    lost = 0.0
    for step in range(steps):
        n = (step + 0.5) / steps * length
        # the unit below which terms are cut off: a power of two, 0.72 times the bound on average (1 / (2 ln 2))
        unit = 2.0**-rule.fraction_bits * 0.7213 * math.sqrt((alignment * n) ** 2 + n)
        cut = max(unit - _PRODUCT_EPS, 0.0)
        lost += cut / (cut + _HALF_CUT) / steps
    return lost


@functools.lru_cache(maxsize=64)
def accumulator_from_key(key: str) -> Accumulator | None:
    """The profile of that `Accumulator.key`; None for ""."""
    return Accumulator(**json.loads(key)) if key else None
