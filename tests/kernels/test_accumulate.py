"""GEMM under accumulators: results of real cards, and a second implementation in whole numbers and fractions.

Both kernels, torch and C++, take every test. The rules stand here once more, as numbers: a changed profile fails.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ottava.kernels import accumulate as in_torch
from ottava.kernels import scaled_mm
from ottava.kernels.native import accumulate as native
from ottava.kernels.native import build as native_build
from ottava.kernels.triton import gemm as triton_gemm
from ottava.numerics.accumulator import ACCUMULATORS, Accumulator
from ottava.numerics.formats import E2M1, E2M3, E3M2, E4M3, E5M2, E8M0, Format
from ottava.numerics.rounding import decode
from ottava.numerics.scaling import (
    BLOCK_1X16,
    BLOCK_1X32,
    BLOCK_1X128,
    BLOCK_128X128,
    PER_ROW,
    PER_TENSOR,
    Granularity,
    read_scales,
)
from ottava.numerics.tensor import QuantizationSpec, QuantizedTensor

CARDS = np.load(Path(__file__).parent / "tensor_core_fp8.npz")
MMA_SIM = np.load(Path(__file__).parent / "tcgen05_mma_sim.npz")
PROFILE_OF = {"H200": "hopper", "Ada": "ada", "B200": "blackwell_mma"}
NONE = 10**9
RULES = {  # group, bits of an aligned term, bits of the result, promotion
    "hopper": (32, 13, 13, NONE),
    "hopper_promoted": (32, 13, 13, 128),
    "ada": (16, 13, 13, NONE),
    "blackwell_mma": (32, 25, 23, 32),
    "tcgen05": (32, 25, 23, NONE),
}
NEAREST = Accumulator(
    name="nearest", group=7, fraction_bits=10, kept_bits=9, rounding="nearest_even", promotion=21, confirmed=False
)
PAIRS = ((E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3), (E5M2, E5M2), (E2M1, E2M1), (E3M2, E2M3))
GRIDS = (
    (PER_TENSOR, PER_TENSOR),
    (PER_ROW, PER_ROW),
    (PER_ROW, PER_TENSOR),
    (BLOCK_1X128, BLOCK_128X128),
    (BLOCK_1X128, BLOCK_1X128),
    (BLOCK_1X32, BLOCK_1X32),
    (BLOCK_1X16, Granularity(16, 16)),
    (Granularity(3, 5), PER_ROW),
)
Kernel = Callable[..., Tensor]


def kernels() -> dict[str, Kernel]:
    """(a, b, bias, profile, c) -> y in fp32, by each kernel that is there."""

    def run(module: Any, a: Any, b: Any, bias: Tensor | None, profile: Accumulator, c: Tensor | None) -> Tensor:
        assert module.supports_accumulate(a, b, torch.float32, profile) is None
        return module.plan_accumulate(a, b, torch.float32, bias, profile)(a, b, bias, c)

    modules = [in_torch] + ([native] if native_build.load("accumulate").library is not None else [])
    return {module.NAME: lambda *args, module=module: run(module, *args) for module in modules}


def coded(codes: Tensor, fmt: Format, granularity: Granularity = PER_TENSOR, scale: Tensor | None = None) -> Any:
    """An operand of these codes; without a scale all are 1."""
    scale = torch.ones(granularity.grid_shape(tuple(codes.shape))) if scale is None else scale
    return QuantizedTensor(codes.view(fmt.storage_dtype), scale, QuantizationSpec(fmt, granularity), torch.float32)


def same(x: Tensor, y: Tensor) -> bool:
    """Whether all bits are equal; any NaN equals any other."""
    return bool(((x.view(torch.int32) == y.view(torch.int32)) | (x.isnan() & y.isnan())).all())


@pytest.fixture(autouse=True)
def _threads() -> None:
    torch.set_num_threads(3)


@pytest.mark.parametrize("card", PROFILE_OF)
def test_the_bits_of_real_cards(card: str) -> None:
    """Every vector; each is a row of a, a row of b and the element of c on the diagonal."""
    for fmt in ("E4M3", "E5M2"):
        a, b, c, d = (CARDS[f"{card}_{fmt}_{name}"] for name in "abcd")
        assert len(a) >= 250
        start = torch.zeros(len(a), len(a))
        start.diagonal().copy_(torch.from_numpy(c.view(np.float32)))
        operands = [coded(torch.from_numpy(codes), {"E4M3": E4M3, "E5M2": E5M2}[fmt]) for codes in (a, b)]
        for name, kernel in kernels().items():
            y = kernel(*operands, None, ACCUMULATORS[PROFILE_OF[card]], start).diagonal().numpy()
            assert (y.view(np.uint32) == d).all(), (card, fmt, name)


def simulated(kind: str) -> tuple[Any, Any, Tensor, np.ndarray]:
    """Operands, the start and the results of a case of `MMA_SIM`."""
    a, b, c, d = (MMA_SIM[f"{kind}_{name}"] for name in "abcd")
    names = kind.split("_")
    formats = [{"e4m3": E4M3, "e5m2": E5M2}[name] for name in names[1:]] if names[0] != "mxf4nvf4" else [E2M1, E2M1]
    operands = []
    for codes, fmt, side in ((a, formats[0], "sa"), (b, formats[1], "sb")):
        codes = torch.from_numpy(codes)
        if f"{kind}_{side}" not in MMA_SIM:
            operands.append(coded(codes, fmt))
            continue
        scales = torch.from_numpy(MMA_SIM[f"{kind}_{side}"])
        nvfp4 = names[-1] == "ue4m3"
        spec = QuantizationSpec(fmt, BLOCK_1X16 if nvfp4 else BLOCK_1X32, "e4m3" if nvfp4 else "e8m0")
        scale = decode(scales.view(torch.float8_e4m3fn), E4M3) if nvfp4 else read_scales(scales)
        operands.append(QuantizedTensor(codes.view(fmt.storage_dtype), scale, spec, torch.float32))
    return *operands, torch.from_numpy(c.view(np.float32)), d


def test_tcgen05_has_the_bits_of_mma_sim() -> None:
    """Two instructions in a row, with a start: all kinds of tcgen05.mma that MMA-Sim multiplies.

    The vectors are results of MMA-Sim (github.com/microsoft/MMA-Sim, MIT licence, commit c785138), which was run on
    random codes, scales and starts; no line of it is here. It does not multiply E2M1 by E4M3, and zeros have an
    exponent of -126 there, which no scale of these vectors lets show.
    """
    kinds = {name.rsplit("_", 1)[0] for name in MMA_SIM}
    assert len(kinds) == 6
    for kind in sorted(kinds):
        a, b, c, d = simulated(kind)
        for name, kernel in kernels().items():
            y = kernel(a, b, None, ACCUMULATORS["tcgen05"], c).numpy()
            assert (y.view(np.uint32) == d).all(), (kind, name, int((y.view(np.uint32) == d).sum()), d.size)


def test_no_other_profile_has_the_bits_of_a_card() -> None:
    """So that the vectors decide: fp32 sums, the wrong group, more bits, or the accumulator among the terms fail."""
    for card, fmt in itertools.product(PROFILE_OF, ("E4M3", "E5M2")):
        a, b, c, d = (CARDS[f"{card}_{fmt}_{name}"] for name in "abcd")
        start = torch.zeros(len(a), len(a))
        start.diagonal().copy_(torch.from_numpy(c.view(np.float32)))
        operands = [coded(torch.from_numpy(codes), {"E4M3": E4M3, "E5M2": E5M2}[fmt]) for codes in (a, b)]
        profile = ACCUMULATORS[PROFILE_OF[card]]
        others = [
            replace(profile, group=8, promotion=8 if profile.promotion else None),
            replace(profile, fraction_bits=12 if profile.fraction_bits == 13 else 14),
            replace(
                profile, promotion=None if profile.promotion else profile.group, kept_bits=min(profile.kept_bits, 12)
            ),
        ]
        for other in others:
            y = in_torch.gemm(*operands, torch.float32, None, other, start).diagonal().numpy()
            assert (y.view(np.uint32) != d).any(), (card, fmt, other)


# --- the same rule in whole numbers ----------------------------------------------------------------------------------


def number(code: int, fmt: Format) -> tuple[Fraction, int] | float:
    """(value, exponent clamped at that of the smallest normal number); a float if it is infinity or NaN."""
    sign = -1 if fmt.signed and code >> (fmt.bits - 1) else 1
    field = code >> fmt.mantissa_bits & (1 << fmt.exponent_bits) - 1
    mantissa = code & (1 << fmt.mantissa_bits) - 1
    top = (1 << fmt.exponent_bits) - 1
    if fmt.specials == "fn" and field == top and mantissa == (1 << fmt.mantissa_bits) - 1:
        return math.nan
    if fmt.specials == "ieee" and field == top:
        return math.nan if mantissa else sign * math.inf
    exponent = max(field, 1) - fmt.bias
    whole = mantissa + (1 << fmt.mantissa_bits if field else 0)
    return sign * whole * Fraction(2) ** (exponent - fmt.mantissa_bits), exponent


def exponent_of(x: Fraction) -> int:
    """floor(log2 |x|)."""
    e = abs(x.numerator).bit_length() - x.denominator.bit_length()
    return e if abs(x) >= Fraction(2) ** e else e - 1


def cut(x: Fraction, bits: int) -> Fraction:
    """Toward zero, to so many bits after the leading one."""
    unit = Fraction(2) ** (exponent_of(x) - bits) if x else Fraction(1)
    return math.trunc(x / unit) * unit


def nearest(x: Fraction, bits: int = 23, smallest: int = -126) -> Fraction:
    """To nearest, ties to even; fp32's by default."""
    unit = Fraction(2) ** (max(exponent_of(x), smallest) - bits) if x else Fraction(1)
    return round(x / unit) * unit


def summed(a: list[Any], b: list[Any], start: Fraction, rule: tuple[int, int, int, int], to_nearest: bool) -> Fraction:
    """One sum of products, by the definition."""
    group, fraction, kept, promotion = rule
    total, carry = (start, Fraction(0)) if promotion < NONE else (Fraction(0), start)
    for at in range(0, len(a), group):
        terms = [(x * y, e + f) for (x, e), (y, f) in zip(a[at : at + group], b[at : at + group], strict=True)]
        terms = [(product, e) for product, e in terms if product]
        if carry:
            terms.append((carry, max(exponent_of(carry), -126)))
        unit = Fraction(2) ** (max((e for _, e in terms), default=0) - fraction)
        carry = sum((math.trunc(product / unit) for product, _ in terms), 0) * unit
        carry = nearest(carry, kept, -1000) if to_nearest else cut(carry, kept)
        if promotion < NONE and ((at + group) % promotion == 0 or at + group >= len(a)):
            total, carry = nearest(total + carry), Fraction(0)
    return total if promotion < NONE else carry


def expected(a: Any, b: Any, bias: Tensor | None, c: Tensor | None, rule: Any, to_nearest: bool) -> list[list[float]]:
    """y as the docs of `kernels.accumulate` write it, in fractions; each operation rounds to fp32."""
    (m, k), n = a.shape, b.shape[0]
    rows_a, rows_b = (
        [[number(code, side.spec.format) for code in row] for row in side.data.view(torch.uint8).tolist()]
        for side in (a, b)
    )
    columns = [side.spec.granularity.cols for side in (a, b)]
    step = math.gcd(*(cols for cols in columns if cols is not None and cols < k)) or k

    def scale(side: Any, row: int, at: int) -> Fraction:
        rows, cols = side.spec.granularity.rows or side.shape[0], side.spec.granularity.cols or k
        return Fraction(float(side.scale_inv[row // rows, at // cols]))

    def one(i: int, j: int) -> float:
        begin = 0.0 if c is None else float(c[i, j])
        special = [x for x in (begin,) if not math.isfinite(x)]
        pairs = list(zip(rows_a[i], rows_b[j], strict=True))
        for x, y in pairs:
            if isinstance(x, float) or isinstance(y, float):
                product = (x if isinstance(x, float) else float(x[0])) * (y if isinstance(y, float) else float(y[0]))
                special.append(product)
        if special:
            return float(np.float64(sum(special)))
        start = Fraction(begin)
        if step >= k:
            x, y = scale(a, i, 0), scale(b, j, 0)
            part = summed(rows_a[i], rows_b[j], nearest(nearest(start / x) / y), rule, to_nearest)
            total = nearest(nearest(part * x) * y)
        else:
            total = start
            for at in range(0, k, step):
                part = summed(rows_a[i][at : at + step], rows_b[j][at : at + step], Fraction(0), rule, to_nearest)
                total = nearest(nearest(scale(a, i, at) * scale(b, j, at)) * part + total)
        return float(nearest(total + Fraction(0 if bias is None else float(bias[j]))))

    return [[one(i, j) for j in range(n)] for i in range(m)]


def operand(rows: int, k: int, fmt: Format, granularity: Granularity, *, specials: bool) -> Any:
    """Random codes of all kinds, a row of zeros and one of subnormal numbers among them; random fp32 scales."""
    codes = torch.randint(0, 1 << fmt.bits, (rows, k), dtype=torch.uint8)
    codes[0, ::2] = 0
    codes[-1] &= (1 << fmt.mantissa_bits) - 1
    if not specials:
        plain = torch.tensor([not isinstance(number(code, fmt), float) for code in range(1 << fmt.bits)])
        codes[~plain[codes.long()]] = 1
    scale = torch.rand(granularity.grid_shape((rows, k))) + 0.5
    return coded(codes, fmt, granularity, scale)


@pytest.mark.parametrize("name", [*RULES, "nearest"])
def test_the_rule_in_whole_numbers(name: str) -> None:
    """All formats, scales and starts, K that is no multiple of a group or a block, NaN and infinity."""
    torch.manual_seed(sorted(RULES).index(name) if name in RULES else 9)
    rule, profile = RULES.get(name, (7, 10, 9, 21)), ACCUMULATORS.get(name, NEAREST)
    first = [*RULES, "nearest"].index(name) % 2  # every second case: the rules share them out
    for number_of, ((lhs, rhs), (of_a, of_b)) in list(enumerate(itertools.product(PAIRS, GRIDS)))[first::2]:
        k = (1, 31, 33, 150, 257)[number_of % 5]
        a = operand(3, k, lhs, of_a, specials=number_of % 3 == 0)
        b = operand(4, k, rhs, of_b, specials=number_of % 7 == 0)
        c = None if number_of % 2 else torch.randn(3, 4) * 10.0 ** torch.randint(-6, 6, (3, 4))
        bias = torch.randn(4) if number_of % 4 == 0 else None
        if c is not None and number_of % 6 == 0:
            c[0, 0], c[1, 1], c[2, 2] = 2.0**-140, 0.0, math.inf
        truth = torch.tensor(expected(a, b, bias, c, rule, profile.rounding == "nearest_even"))
        for kernel, run in kernels().items():
            y = run(a, b, bias, profile, c)
            assert same(y + 0.0, truth + 0.0), (kernel, lhs, rhs, of_a, of_b, k, y, truth)


def test_empty_operands_and_formats_that_no_tensor_core_takes() -> None:
    """No K: y is c and the bias. Without products or with wide formats C++ steps aside by a sentence."""
    hopper, c, bias = ACCUMULATORS["hopper"], torch.randn(2, 3), torch.randn(3)
    a, b = (coded(torch.zeros(rows, 0, dtype=torch.uint8), E4M3) for rows in (2, 3))
    assert torch.equal(in_torch.gemm(a, b, torch.float32, bias, hopper, c), c + bias)
    assert native.supports_accumulate(a, b, torch.float32, hopper) == "native_accumulator: an empty operand"
    wide = coded(torch.zeros(2, 4, dtype=torch.uint8), E8M0)
    for module in (in_torch, native):
        assert "takes signed formats of up to 8 bits; got E8M0" in module.supports_accumulate(
            wide, wide, torch.float32, hopper
        )


def test_fma_rounds_once() -> None:
    """Ties of the second rounding that the first one makes; against fractions."""
    x, y = torch.rand(2000) + 1, torch.rand(2000) * 2.0 ** torch.randint(-40, 2, (2000,))
    z = torch.randn(2000) * 2.0 ** torch.randint(-30, 30, (2000,))
    z[:500] = -(x * y)[:500]
    terms = [t.tolist() for t in (x, y, z)]
    truth = [nearest(Fraction(p) * Fraction(q) + Fraction(r)) for p, q, r in zip(*terms, strict=True)]
    assert in_torch.fma(x, y, z).tolist() == [float(t) for t in truth]


def test_long_sums_lose_what_is_below_the_leading_bits() -> None:
    """One, and 2**-14 a thousand times: Hopper has 1. Promoted every 128 it keeps what the later chains have made."""
    a = torch.full((1, 1025), 2.0**-7).to(torch.float8_e4m3fn)
    a[0, 0] = 1.0
    b = torch.full((1, 1025), 2.0**-7).to(torch.float8_e4m3fn)
    b[0, 0] = 1.0
    lhs, rhs = (coded(x.view(torch.uint8), E4M3) for x in (a, b))
    got = {name: float(in_torch.gemm(lhs, rhs, torch.float32, None, ACCUMULATORS[name])) for name in RULES}
    assert got["hopper"] == got["ada"] == 1.0
    assert got["tcgen05"] == got["blackwell_mma"] == 1.0 + 1024 * 2.0**-14
    assert got["hopper_promoted"] == 1.0 + (1025 - 128) * 2.0**-14


@pytest.mark.gpu
@pytest.mark.parametrize("k", [32, 128, 160, 1024, 4096])
def test_hopper_is_its_profile(k: int) -> None:
    """torch._scaled_mm and our Triton kernel on one tile, where no K is split; and the emulation on the GPU itself."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs Hopper (sm_90)")
    torch.manual_seed(k)
    for lhs, rhs in ((E4M3, E4M3), (E5M2, E4M3)):
        a, b = (operand(128, k, fmt, PER_TENSOR, specials=False) for fmt in (lhs, rhs))
        a, b = (replace(side, scale_inv=torch.ones(1, 1)) for side in (a, b))
        there = [replace(side, data=side.data.cuda(), scale_inv=side.scale_inv.cuda()) for side in (a, b)]
        for name, fast, promote in (("hopper", True, 0), ("hopper_promoted", False, 128)):
            truth = in_torch.gemm(a, b, torch.float32, None, ACCUMULATORS[name])
            assert same(in_torch.gemm(*there, torch.float32, None, ACCUMULATORS[name]).cpu(), truth)
            assert same(scaled_mm.gemm(*there, torch.float32, None, fast).cpu(), truth), (name, "scaled_mm")
            config = triton_gemm.Config(64, 128, 3, 4, promote)
            assert same(triton_gemm.run(*there, torch.float32, None, config).cpu(), truth), (name, "triton")
