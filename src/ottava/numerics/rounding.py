"""Every cast of ottava: rounding to a format's grid, codes from numbers and numbers from codes.

The rule, the same on every device and every torch from 2.11 on:
- nearest-even (default) or stochastic, subnormals included, exact: no double rounding, no flush to zero;
- finite numbers beyond the format's range saturate to its last number, as in satfinite hardware;
- NaN stays NaN and an infinity becomes NaN, in formats that have infinities, too: what BF16 would show stays visible;
- a format without NaN (E2M1, E2M3, E3M2) takes its largest number in their place, as NVIDIA's `cvt` does. A cast with
  scales makes the scale of their block NaN (`scaling.with_nan`); `round_to_format` and `encode` lose them;
- -0 keeps its sign, if the format has one. The payload and sign of a NaN are not specified.

torch's own casts are not enough: E4M3 overflow is NaN in torch 2.11 and 448 in 2.13 (pytorch #178817), E5M2 overflow
is infinity in both, and torch has no cast to 4- and 6-bit formats. So this module always clamps first.

This module applies no scales; see `scaling` and `kernels.reference`.
"""

from __future__ import annotations

import functools
import math
from typing import Literal, get_args

import torch
from torch import Tensor

from ottava.base.errors import unknown_name
from ottava.numerics.formats import E4M3, E8M0, Format

Rounding = Literal["nearest_even", "stochastic"]

_INPUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_FP64_MANTISSA_BITS, _FP64_BIAS, _FP64_EXPONENT_MASK = 52, 1023, 0x7FF
_LOW_32 = 0xFFFFFFFF


def check_input_dtype(x: Tensor, caller: str) -> None:
    """Raises TypeError unless x is float32, bfloat16 or float16: others would round twice or silently lose range."""
    if x.dtype not in _INPUT_DTYPES:
        raise TypeError(f"{caller}: got {x.dtype}; needs float32, bfloat16 or float16: cast with .float() first")


def round_to_format(
    x: Tensor, fmt: Format, *, rounding: Rounding = "nearest_even", generator: torch.Generator | None = None
) -> Tensor:
    """The nearest number of `fmt` for every element, as fp32.

    Args:
        x: any shape; float32, bfloat16 or float16.
        rounding: "nearest_even", or "stochastic": up with the probability of the distance from the lower neighbour, in
            steps of 2**-24; the random bits of an element depend on its place, row by row, and on one seed a call.
        generator: of the seed of stochastic rounding; None: torch's default generator.
    Returns:
        fp32, shape of x; every entry is a number of `fmt`, or NaN.
    Raises:
        TypeError: x has another dtype.  ValueError: unknown rounding.
    Source: OFP8 v1.0 section 5 (RNE, saturation mode); infinities are ours.

    Example:
        >>> from ottava.numerics.formats import E4M3
        >>> round_to_format(torch.tensor([17.0, 19.0, 0.001, 1e9]), E4M3)   # ties to even, subnormal, saturation
        tensor([1.6000e+01, 2.0000e+01, 1.9531e-03, 4.4800e+02])
    """
    check_input_dtype(x, "round_to_format")
    if rounding == "nearest_even" and fmt.dtype is not None and fmt != E8M0:
        # in fp32: the bounds of FP32 and BF16 are not numbers of every input dtype; NaN passes through clamp
        y = infinities_to_nan_(x.to(torch.float32, copy=True), fmt)
        return y.clamp_(fmt.lowest, fmt.max).to(fmt.dtype).to(torch.float32)
    x = infinities_to_nan_(x.to(torch.float32, copy=True), fmt)
    return _round_on_grid(x, fmt, rounding, generator)[0].to(torch.float32)


def infinities_to_nan_(x: Tensor, fmt: Format) -> Tensor:
    """Makes NaN of the infinities of an fp32 tensor, in place, if `fmt` has NaN; other numbers keep their bits.

    A cast does so before it multiplies by a scale: a finite number whose product is infinite saturates.

    Example:
        >>> infinities_to_nan_(torch.tensor([1.0, -torch.inf]), E4M3)
        tensor([1., nan])
    """
    return x.nan_to_num_(math.nan, math.nan, math.nan) if fmt.has_nan else x


def encode(
    x: Tensor, fmt: Format, *, rounding: Rounding = "nearest_even", generator: torch.Generator | None = None
) -> Tensor:
    """The codes of x rounded to `fmt`, in `fmt.storage_dtype`; arguments and errors as `round_to_format`.

    Codes have the format's torch dtype. Formats without one give uint8, one code in the low bits of each byte.

    Example:
        >>> from ottava.numerics.formats import E2M1
        >>> encode(torch.tensor([0.5, -6.0, 100.0]), E2M1)
        tensor([ 1, 15,  7], dtype=torch.uint8)
    """
    check_input_dtype(x, "encode")
    return encode_(infinities_to_nan_(x.to(torch.float32, copy=True), fmt), fmt, rounding=rounding, generator=generator)


def encode_(
    x: Tensor, fmt: Format, *, rounding: Rounding = "nearest_even", generator: torch.Generator | None = None
) -> Tensor:
    """As `encode`, of products in fp32 that it may overwrite; infinite ones saturate (see `infinities_to_nan_`)."""
    if fmt.dtype is not None and fmt != E8M0:
        y = x if rounding == "nearest_even" else _round_on_grid(x, fmt, rounding, generator)[0].to(torch.float32)
        return y.clamp_(fmt.lowest, fmt.max).to(fmt.dtype)  # NaN passes through clamp
    y, exponent = _round_on_grid(x, fmt, rounding, generator)
    significand = (y.abs() * power_of_two(fmt.mantissa_bits - exponent)).nan_to_num(0.0).to(torch.int64)
    # the implied one of a significand carries into the exponent field; subnormals leave that field 0
    codes = ((exponent - fmt.emin) << fmt.mantissa_bits) + significand
    if not fmt.has_zero:
        codes = codes - (1 << fmt.mantissa_bits)
    if fmt.has_nan:
        codes = torch.where(y.isnan(), (1 << (fmt.bits - int(fmt.signed))) - 1, codes)
    if fmt.signed:
        codes = codes | (torch.signbit(y).to(torch.int64) << (fmt.bits - 1))
    codes = codes.to(torch.uint8)
    return codes if fmt.dtype is None else codes.view(fmt.dtype)


def decode(codes: Tensor, fmt: Format) -> Tensor:
    """The exact numbers of codes in `fmt.storage_dtype`, as a new fp32 tensor.

    Raises:
        TypeError: the codes are not in fmt.storage_dtype.

    Example:
        >>> from ottava.numerics.formats import E2M1
        >>> decode(torch.tensor([1, 15, 7], dtype=torch.uint8), E2M1)
        tensor([ 0.5000, -6.0000,  6.0000])
    """
    if codes.dtype != fmt.storage_dtype:
        raise TypeError(f"decode: {fmt} codes are held in {fmt.storage_dtype}; got {codes.dtype}")
    if fmt == E4M3 and codes.is_cpu and type(codes) is Tensor and not torch.compiler.is_compiling():
        transformed = torch._C._are_functorch_transforms_active()  # where no number can be asked for
        return codes.to(torch.float32, copy=True) if transformed else _decode_e4m3(codes)
    if fmt.dtype is not None and fmt != E8M0:
        return codes.to(torch.float32, copy=True)
    return _table(fmt, codes.device)[codes.view(torch.uint8).to(torch.int32)]


def _decode_e4m3(codes: Tensor) -> Tensor:
    """Moves the bits of E4M3 into fp32's fields, on a CPU: torch's conversion takes ten times as long."""
    bits = codes.view(torch.int8).to(torch.int32)
    bits <<= 20  # mantissa and exponent to the low end of fp32's fields, the sign to bit 31
    bits &= -0x78000001  # clears the sign extension in the upper exponent bits
    y = bits.view(torch.float32).mul_(2.0 ** (127 - E4M3.bias))  # exact, subnormals too
    if y.numel():
        low, high = torch.aminmax(y)
        if max(-float(low), float(high)) > E4M3.max:  # 480 stands for the NaN code
            y[y.abs() > E4M3.max] = math.nan
    return y


def code_values(fmt: Format) -> Tensor:
    """The values of all codes of `fmt` in the order of the codes, fp32 (2**bits,), by the definition, not by torch.

    Raises:
        ValueError: the format has more than 16 bits.

    Example:
        >>> from ottava.numerics.formats import E2M1
        >>> code_values(E2M1)[:8]
        tensor([0.0000, 0.5000, 1.0000, 1.5000, 2.0000, 3.0000, 4.0000, 6.0000])
    """
    if fmt.bits > 16:
        raise ValueError(f"code_values: {fmt} has 2**{fmt.bits} codes; at most 2**16 are listed")
    return torch.tensor([_value_of_code(code, fmt) for code in range(1 << fmt.bits)], dtype=torch.float32, device="cpu")


@functools.lru_cache(maxsize=16)
def byte_values(fmt: Format) -> Tensor:
    """`code_values` of a format of at most 8 bits for C++, which indexes them by a byte: zeros fill it up."""
    values = code_values(fmt)
    return torch.nn.functional.pad(values, (0, 256 - values.numel()))


@functools.lru_cache(maxsize=32)
def _table(fmt: Format, device: torch.device) -> Tensor:
    return code_values(fmt).to(device)


def _value_of_code(code: int, fmt: Format) -> float:
    magnitude_bits = fmt.exponent_bits + fmt.mantissa_bits
    sign = -1.0 if fmt.signed and code >> magnitude_bits else 1.0
    if fmt.specials == "fnuz" and code == 1 << magnitude_bits:
        return math.nan
    exponent = (code >> fmt.mantissa_bits) & ((1 << fmt.exponent_bits) - 1)
    mantissa = code & ((1 << fmt.mantissa_bits) - 1)
    top = exponent == (1 << fmt.exponent_bits) - 1
    if fmt.specials == "ieee" and top:
        return sign * math.inf if mantissa == 0 else math.nan
    if fmt.specials == "fn" and top and mantissa == (1 << fmt.mantissa_bits) - 1:
        return math.nan
    if exponent == 0 and fmt.has_zero:
        return sign * (mantissa * fmt.min_subnormal)
    return sign * math.ldexp(1 + mantissa * fmt.eps, exponent - fmt.bias)


def _round_on_grid(
    x: Tensor, fmt: Format, rounding: Rounding, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """(numbers of fmt as fp64, exponent of each one's binade as int64, at least fmt.emin).

    It computes in fp64: every fp32 number is normal there and x / quantum is exact, so there is one rounding.
    """
    x64 = x.to(torch.float64)
    quantum = power_of_two(_exponent(x64, fmt) - fmt.mantissa_bits)
    steps = x64 / quantum
    if rounding == "nearest_even":
        steps = steps.round()
    elif rounding == "stochastic":
        bits = random_bits(draw_seed(x.device, generator), x.numel()).view(x.shape)
        # away from zero if the fraction plus 24 random bits reaches the next step
        steps = torch.copysign((steps.abs() + (bits >> 8).to(torch.float64) * 2.0**-24).floor(), x64)
    else:
        raise ValueError(unknown_name("rounding", rounding, get_args(Rounding)))
    y = (steps * quantum).clamp(fmt.lowest, fmt.max)
    if not fmt.has_nan:
        y = torch.where(y.isnan(), fmt.max, y)
    if fmt.specials == "fnuz":
        y = y + 0.0  # -0 becomes 0
    return y, _exponent(y, fmt)  # computed again: rounding may carry into the next binade


def draw_seed(device: torch.device, generator: torch.Generator | None = None) -> Tensor:
    """int64 () on `device`, from torch's generator of that device; restoring the generator restores the seed."""
    return torch.randint(-(2**63), 2**63 - 1, (), generator=generator, device=device, dtype=torch.int64)


def random_bits(seed: Tensor, count: int, start: int = 0) -> Tensor:
    """32 random bits for each of `count` elements, as int64; element i has word i % 4 of philox(i // 4, key=seed).

    start: the first element.

    They depend on seed and i only, not on threads, device or memory layout.

    Example:
        >>> random_bits(torch.tensor(0), 5)
        tensor([1713891541, 3781805453, 3159862348, 2600524760, 4175744164])
    """
    number = torch.arange(start // 4, -(-(start + count) // 4), device=seed.device)
    return _four_words(seed, number).view(-1)[start % 4 : start % 4 + count]


def random_bits_at(seed: Tensor, places: Tensor) -> Tensor:
    """As `random_bits`, of the elements at `places` (int64, any shape).

    Example:
        >>> random_bits_at(torch.tensor(0), torch.tensor([4, 1]))
        tensor([4175744164, 3781805453])
    """
    return _four_words(seed, places // 4).gather(-1, (places % 4)[..., None])[..., 0]


def _four_words(seed: Tensor, number: Tensor) -> Tensor:
    counter = (number & _LOW_32, number >> 32, torch.zeros_like(number), torch.zeros_like(number))
    return torch.stack(philox(counter, (seed & _LOW_32, (seed >> 32) & _LOW_32)), -1)


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Philox4x32-10: four random words for each counter. All words are int64 from 0 to 2**32 - 1.

    Source: Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3. SC 2011; Random123.
    """
    a, b, c, d = counter
    first, second = key
    for _ in range(10):
        low, high = a * 0xD2511F53, c * 0xCD9E8D57  # int64 wraps to the bits of the unsigned product
        a, b = ((high >> 32) & _LOW_32) ^ b ^ first, high & _LOW_32
        c, d = ((low >> 32) & _LOW_32) ^ d ^ second, low & _LOW_32
        first, second = (first + 0x9E3779B9) & _LOW_32, (second + 0xBB67AE85) & _LOW_32
    return a, b, c, d


def _exponent(x64: Tensor, fmt: Format) -> Tensor:
    return floor_log2(x64).clamp(fmt.emin, fmt.emax)


def floor_log2(x: Tensor) -> Tensor:
    """floor(log2(|x|)) as int64, exact, from the bits; a floating-point log2 rounds 2**k - ulp up to k.

    0 gives -1023; infinity and NaN give 1024.

    Example:
        >>> floor_log2(torch.tensor([1.0, 7.9999995, 2.0**-149]))
        tensor([   0,    2, -149])
    """
    field = (x.to(torch.float64).view(torch.int64) >> _FP64_MANTISSA_BITS) & _FP64_EXPONENT_MASK
    return field - _FP64_BIAS


def power_of_two(exponent: Tensor) -> Tensor:
    """2**exponent as fp64 from the bits; torch's pow, exp2 and ldexp promise no exact powers. Exponents -1022 to 1023.

    Example:
        >>> power_of_two(torch.tensor([-149, 3]))
        tensor([1.4013e-45, 8.0000e+00], dtype=torch.float64)
    """
    return ((exponent + _FP64_BIAS) << _FP64_MANTISSA_BITS).view(torch.float64)
