"""Every cast against independent witnesses: ml_dtypes and gfloat, exhaustively where there are few enough numbers.

ml_dtypes rounds to nearest even and overflows in its own way, so its input is clipped first; gfloat saturates itself.
Neither is told how ottava rounds. Numbers are compared by their fp32 bits, which tells -0 from 0; NaN has no sign here.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, get_args

import gfloat
import numpy as np
import pytest
import torch
from torch import Tensor

from ottava.numerics.formats import E2M1, E4M3, E5M2, E8M0, FORMATS, FP32, Format, Specials
from ottava.numerics.rounding import (
    Rounding,
    _round_on_grid,
    code_values,
    decode,
    draw_seed,
    encode,
    encode_,
    floor_log2,
    philox,
    power_of_two,
    random_bits,
    random_bits_at,
    round_to_format,
)
from sweep import sweep

SAMPLES = 1 << 21
CAST_BY_TORCH = [fmt for fmt in FORMATS.values() if fmt.dtype is not None and fmt != E8M0]
LISTED = [fmt for fmt in FORMATS.values() if fmt != FP32]
"""Formats whose every code can be looked at."""


def all_codes(fmt: Format) -> Tensor:
    """Every code of a format of at most 16 bits, in its storage type."""
    raw = torch.arange(1 << fmt.bits, dtype=torch.int32)
    width = {1: torch.uint8, 2: torch.int16}[fmt.storage_dtype.itemsize]
    return raw.to(width).view(fmt.storage_dtype)


def finite_values(fmt: Format) -> Tensor:
    """Every finite number of a format once, ascending, fp64."""
    values = code_values(fmt).double()
    return values[values.isfinite()].unique()


def every_16_bit_number(dtype: torch.dtype) -> Tensor:
    """All 65,536 of them: subnormals, both zeros, infinities, every NaN."""
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)


def fp32_bit_patterns() -> Tensor:
    """Random fp32 bit patterns: all 256 exponents, both signs, subnormals, infinities and NaN."""
    bits = torch.randint(-(2**31), 2**31, (SAMPLES,), dtype=torch.int64).to(torch.int32)
    return torch.cat([bits.view(torch.float32), torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan])])


def ties_and_neighbours(fmt: Format) -> Tensor:
    """Every number of a format, every midpoint of two, and the fp32 numbers just beside them, of both signs."""
    values = finite_values(fmt)
    points = torch.cat([values, (values[1:] + values[:-1]) / 2, torch.tensor([fmt.max * (1 + fmt.eps)])])
    x = points.to(torch.float32)
    exact = x[torch.isfinite(x)]  # beyond BF16's max there is no fp32 number
    up, down = (torch.nextafter(exact, torch.full_like(exact, towards)) for towards in (math.inf, -math.inf))
    return torch.cat([exact, up, down, -exact, -up, -down])


def as_numpy_fp32(x: Tensor) -> np.ndarray:
    return x.to(torch.float32).contiguous().numpy()


def without_infinities(x: Tensor, fmt: Format) -> np.ndarray:
    """What the rule of this package hands to a witness."""
    numbers = as_numpy_fp32(x)
    return np.where(np.isinf(numbers), np.float32(np.nan), numbers) if fmt.has_nan else numbers


def ml_dtypes_rounds(x: Tensor, fmt: Format, ml_dtypes_type: Any) -> np.ndarray:
    """ml_dtypes' codes of x, clipped to the format's range first; NaN in place of infinities where it has NaN."""
    with np.errstate(invalid="ignore"):  # numpy warns of NaN
        return np.clip(without_infinities(x, fmt), np.float32(fmt.lowest), np.float32(fmt.max)).astype(ml_dtypes_type)


def assert_same_numbers(ours: Tensor, witness: np.ndarray, fmt: Format) -> None:
    """Equal bits, NaN in the same places; what is NaN to a witness is the largest number of a format without NaN."""
    theirs = torch.from_numpy(witness.astype(np.float32))
    nan = theirs.isnan()
    assert ours.dtype == torch.float32
    assert torch.equal(ours[~nan].view(torch.int32), theirs[~nan].view(torch.int32))
    assert ours[nan].isnan().all() if fmt.has_nan else (ours[nan] == fmt.max).all()


def assert_same_as_ml_dtypes(x: Tensor, fmt: Format, ml_dtypes_type: Any) -> None:
    """Numbers and, byte for byte, codes."""
    nan = torch.from_numpy(np.isnan(without_infinities(x, fmt)))
    if not fmt.has_nan:  # ml_dtypes makes -0 of it, ottava what NVIDIA's cvt makes of it
        assert (round_to_format(x[nan], fmt) == fmt.max).all()
        x, nan = x[~nan], nan[~nan]
    if fmt == E8M0:  # ml_dtypes 0.6 rounds all fp32 subnormals above 2**-127 up to 2**-126, from 2**-127 + ulp on
        outside = ~((x > fmt.min_normal) & (x < 1.5 * fmt.min_normal))
        x, nan = x[outside], nan[outside]
    witness = ml_dtypes_rounds(x, fmt, ml_dtypes_type)
    assert_same_numbers(round_to_format(x, fmt), witness, fmt)
    codes = encode(x, fmt)
    assert codes.dtype == fmt.storage_dtype
    raw = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[codes.dtype.itemsize]
    theirs = torch.from_numpy(witness.view(f"u{codes.dtype.itemsize}").astype(np.int64))
    assert torch.equal(codes.view(raw).to(torch.int64)[~nan] & (1 << fmt.bits) - 1, theirs[~nan])


@sweep(dtype=[torch.bfloat16, torch.float16])
def test_every_16_bit_number_rounds_as_in_ml_dtypes(fmt: Format, dtype: torch.dtype, ml_dtypes_type: Any) -> None:
    """All 65,536 bf16 and all fp16 numbers, values and codes."""
    assert_same_as_ml_dtypes(every_16_bit_number(dtype), fmt, ml_dtypes_type)


@sweep
def test_fp32_numbers_round_as_in_ml_dtypes(fmt: Format, ml_dtypes_type: Any) -> None:
    """Two million bit patterns for each format: every exponent is met about four thousand times with either sign."""
    assert_same_as_ml_dtypes(fp32_bit_patterns(), fmt, ml_dtypes_type)


@sweep(fmt=LISTED)
def test_ties_and_their_neighbours_round_as_in_ml_dtypes(fmt: Format, ml_dtypes_type: Any) -> None:
    """E4M3 near 17 = (16 + 18) / 2: 17 - ulp -> 16, 17 -> 16 (even), 17 + ulp -> 18; and so at every midpoint."""
    assert_same_as_ml_dtypes(ties_and_neighbours(fmt), fmt, ml_dtypes_type)


def test_scale_format_rounds_its_lowest_binade_too() -> None:
    """E8M0 has no number below 2**-127; from 1.5 * 2**-127 on it is 2**-126, and everything smaller is 2**-127."""
    steps = torch.tensor([-1e9, 0, 1, 2**21, 2**22, 2**22 + 1, 3 * 2**21 - 1, 3 * 2**21, 3 * 2**21 + 1, 2**23])
    y = round_to_format(steps.double().mul(2.0**-149).to(torch.float32), E8M0)
    assert torch.equal(y, torch.where(steps >= 3 * 2**21, 2.0**-126, 2.0**-127))


@sweep(fmt=[fmt for fmt in FORMATS.values() if fmt != E8M0])
def test_gfloat_agrees(fmt: Format, gfloat_info: Any) -> None:
    """A second witness, which saturates by its own rule. Its E8M0 has signs and breaks ties otherwise: left out."""
    sources = [every_16_bit_number(torch.bfloat16), every_16_bit_number(torch.float16)]
    sources.append(ties_and_neighbours(fmt) if fmt in LISTED else fp32_bit_patterns()[-(1 << 17) :])
    for source in sources:
        x = source if fmt.has_nan else source[~source.isnan()]  # gfloat refuses NaN there
        with np.errstate(invalid="ignore"):  # numpy warns of NaN
            witness = gfloat.round_ndarray(gfloat_info, without_infinities(x, fmt).astype(np.float64), sat=True)
        assert_same_numbers(round_to_format(x, fmt), witness, fmt)


@sweep(fmt=CAST_BY_TORCH)
def test_the_generic_grid_and_torch_casts_agree(fmt: Format) -> None:
    """Two algorithms in one package: fp64 arithmetic for any format, torch's cast where it has the type."""
    sources = [fp32_bit_patterns(), every_16_bit_number(torch.bfloat16), every_16_bit_number(torch.float16)]
    for x in sources:
        numbers = torch.from_numpy(without_infinities(x, fmt))
        on_grid, _ = _round_on_grid(numbers, fmt, "nearest_even", None)
        assert_same_numbers(on_grid.float(), round_to_format(x, fmt).numpy(), fmt)


@sweep(fmt=LISTED)
def test_ties_go_to_the_even_code(fmt: Format) -> None:
    """From the definition: of two neighbouring codes the one whose last bit is 0; E8M0's significand carries: up."""
    codes = torch.arange((1 << (fmt.bits - int(fmt.signed))) - 1)
    values = code_values(fmt).double()
    low, high = values[codes], values[codes + 1]
    between = low.isfinite() & high.isfinite()
    midpoint = ((low + high) / 2)[between].to(torch.float32)
    upper_is_even = codes[between] % 2 == 1
    even = torch.where(upper_is_even | (fmt == E8M0), high[between], low[between])
    assert torch.equal(round_to_format(midpoint, fmt).double(), even)


@sweep(rounding=["nearest_even", "stochastic"])
def test_what_is_too_large_saturates_and_what_is_not_finite_is_nan(
    fmt: Format, rounding: Any, dtype: torch.dtype
) -> None:
    """NaN, inf and -inf -> NaN or, without one, max, max and -max. A product that overflowed saturates (`encode_`)."""
    x = torch.tensor([math.nan, math.inf, -math.inf]).to(dtype)
    for y in (round_to_format(x, fmt, rounding=rounding), decode(encode(x, fmt, rounding=rounding), fmt)):
        assert y.isnan().all() if fmt.has_nan else y.tolist() == [fmt.max, fmt.max, fmt.lowest]
    products = encode_(torch.tensor([math.inf, -math.inf]), fmt, rounding=rounding)
    assert decode(products, fmt).tolist() == [fmt.max, fmt.lowest]
    top = torch.finfo(dtype).max
    if top > fmt.max:
        assert round_to_format(torch.tensor([top, -top]).to(dtype), fmt).tolist() == [fmt.max, fmt.lowest]


@sweep(fmt=LISTED)
def test_every_code_decodes_as_in_both_witnesses(fmt: Format, ml_dtypes_type: Any, gfloat_info: Any) -> None:
    """All codes, each 4-bit and 6-bit one in a byte."""
    codes = all_codes(fmt)
    raw = codes.view(torch.uint8 if codes.dtype.itemsize == 1 else torch.uint16).numpy()
    for values in (decode(codes, fmt), code_values(fmt)):
        nan = values.isnan()
        for witness in (raw.view(ml_dtypes_type), gfloat.decode_ndarray(gfloat_info, raw)):
            theirs = torch.from_numpy(witness.astype(np.float32))
            assert torch.equal(theirs.isnan(), nan)
            assert torch.equal(values[~nan].view(torch.int32), theirs[~nan].view(torch.int32))


@sweep(fmt=LISTED, rounding=["nearest_even", "stochastic"])
def test_every_code_comes_back_from_its_number(fmt: Format, rounding: Any) -> None:
    """encode(decode(c)) = c, byte for byte; NaN and infinities become a NaN."""
    codes = all_codes(fmt)
    values = decode(codes, fmt)
    back = encode(values, fmt, rounding=rounding)
    width = torch.uint8 if codes.dtype.itemsize == 1 else torch.int16
    finite = values.isfinite()
    assert torch.equal(back.view(width)[finite], codes.view(width)[finite])
    again = decode(back, fmt)
    assert torch.equal(again.isnan(), ~finite)


def test_codes_of_formats_that_nobody_has_registered_come_back() -> None:
    """Without a zero but with a mantissa, unsigned with a zero, one bit of exponent: each code, by either rounding.
    Of the codes that are NaN, NaN takes the positive one with all bits set."""
    facts = {"exponent_bits": 2, "mantissa_bits": 2, "bias": 1}
    for signed, has_zero, specials in itertools.product((True, False), (True, False), get_args(Specials)):
        fmt = Format(name="X", signed=signed, has_zero=has_zero, specials=specials, **facts)  # type: ignore[arg-type]
        values, codes = code_values(fmt), torch.arange(1 << fmt.bits, dtype=torch.uint8)
        finite = values.isfinite()
        assert values[finite].max() == fmt.max
        for rounding in get_args(Rounding):
            assert torch.equal(encode(values, fmt, rounding=rounding)[finite], codes[finite]), (fmt, rounding)
            if fmt.has_nan:
                all_set = (1 << (fmt.bits - int(signed))) - 1
                assert encode(torch.tensor(math.nan), fmt, rounding=rounding) == all_set, (fmt, rounding)
        assert torch.equal(decode(codes, fmt)[finite], values[finite])


@sweep
def test_layout_changes_no_code(fmt: Format, matrix: Tensor) -> None:
    """Transposed, strided, expanded and empty tensors give the codes of a contiguous copy, in their own shape."""
    codes, copies = encode(matrix, fmt), encode(matrix.contiguous(), fmt)
    assert codes.shape == matrix.shape
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[codes.dtype.itemsize]
    assert torch.equal(codes.contiguous().view(width), copies.view(width))
    assert torch.equal(decode(codes, fmt), decode(copies, fmt))
    assert torch.equal(round_to_format(matrix, fmt), decode(codes, fmt))


@sweep
def test_the_argument_is_left_as_it_was(fmt: Format) -> None:
    """Casting writes into no tensor of the caller's, neither does decoding."""
    x = torch.randn(64) * 1e3
    before = x.clone()
    codes = encode(x, fmt)
    round_to_format(x, fmt)
    decoded = decode(codes, fmt)
    decoded_before = decoded.clone()
    encode(decoded, fmt)
    assert torch.equal(x, before)
    assert torch.equal(decoded, decoded_before)


# --- stochastic rounding ---------------------------------------------------------------------------------------------


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def neighbours(x: Tensor, fmt: Format) -> tuple[Tensor, Tensor]:
    """The largest number of fmt that is <= x and the smallest that is >= x, both at the end of the range beyond it."""
    values = finite_values(fmt)
    x = x.double().clamp(fmt.lowest, fmt.max)
    lower = values[torch.searchsorted(values, x, right=True) - 1]
    return lower, values[torch.searchsorted(values, x)]


@sweep(fmt=LISTED)
def test_stochastic_rounding_leaves_numbers_of_the_format_alone(fmt: Format) -> None:
    """A number of the format has distance 0 from its lower neighbour: it goes up with probability 0."""
    x = finite_values(fmt).to(torch.float32)
    for seed in range(8):
        assert torch.equal(round_to_format(x, fmt, rounding="stochastic", generator=generator(seed)), x)


@sweep(fmt=LISTED)
def test_stochastic_rounding_takes_one_of_the_two_neighbours(fmt: Format) -> None:
    """17.3 in E4M3 becomes 16 or 18 and nothing else; so does every kind of number."""
    x = torch.cat([fp32_bit_patterns()[-(1 << 16) :], ties_and_neighbours(fmt)[: 1 << 16]])
    x = x[x.isfinite()]
    y = round_to_format(x, fmt, rounding="stochastic", generator=generator(0)).double()
    lower, upper = neighbours(x, fmt)
    assert ((y == lower) | (y == upper)).all()
    signs = x.signbit() if fmt.has_negative_zero else x.signbit() & (y != 0)
    assert torch.equal(y.signbit(), signs) if fmt.signed else (y > 0).all()  # -0.001 may become -0, never 0


@sweep(fmt=LISTED, fraction=[0.03125, 0.25, 0.5, 0.8125])
def test_stochastic_rounding_is_unbiased(fmt: Format, fraction: float) -> None:
    """Between two neighbours at `fraction`: that share goes up, within 5 standard errors, sqrt(f (1 - f) / n)."""
    draws = 1 << 14
    values = finite_values(fmt)
    low = values[torch.linspace(0, len(values) - 2, 9).long()]  # from the lowest, through the subnormals, to the top
    high = values[torch.searchsorted(values, low) + 1]
    x = (low + fraction * (high - low)).to(torch.float32)
    y = round_to_format(x.expand(draws, -1), fmt, rounding="stochastic", generator=generator(1)).double()
    went_up = (y == high).double().mean(0)
    standard_error = math.sqrt(fraction * (1 - fraction) / draws)
    assert ((went_up - fraction).abs() < 5 * standard_error).all()


@sweep(fmt=LISTED)
def test_stochastic_rounding_repeats_with_its_seed(fmt: Format) -> None:
    """Same generator state, same codes; another seed, others; without a generator torch.manual_seed decides."""
    x = torch.randn(4096).abs() * fmt.min_normal * 3
    first, same, other = (encode(x, fmt, rounding="stochastic", generator=generator(s)) for s in (0, 0, 1))
    assert torch.equal(decode(first, fmt), decode(same, fmt))
    assert not torch.equal(decode(first, fmt), decode(other, fmt))
    torch.manual_seed(7)
    default = encode(x, fmt, rounding="stochastic")
    seeded = encode(x, fmt, rounding="stochastic", generator=generator(7))
    assert torch.equal(decode(default, fmt), decode(seeded, fmt))


PHILOX = {  # counter, key, four words: the known answers of Random123 for philox4x32-10
    "zeros": ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    "ones": ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    "pi": (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
}


@pytest.mark.parametrize("counter, key, words", PHILOX.values(), ids=PHILOX)
def test_philox_gives_its_known_answers(counter: tuple[int, ...], key: tuple[int, ...], words: tuple[int, ...]) -> None:
    """Those of its authors."""
    got = philox(tuple(map(torch.tensor, counter)), tuple(map(torch.tensor, key)))  # type: ignore[arg-type]
    assert tuple(int(word) for word in got) == words


def test_random_bits_belong_to_seed_and_place() -> None:
    """Element i has word i % 4 of counter i // 4 under the seed's two halves; negative seeds are bits like others."""
    for seed in (0, 5, -1, 2**63 - 1, -(2**63)):
        bits = random_bits(torch.tensor(seed), 11)
        key = torch.tensor(seed % 2**32), torch.tensor((seed >> 32) % 2**32)
        zero = torch.tensor(0)
        assert bits.tolist() == [int(philox((torch.tensor(i // 4), zero, zero, zero), key)[i % 4]) for i in range(11)]
        assert torch.equal(random_bits(torch.tensor(seed), 7), bits[:7])
    assert random_bits(torch.tensor(0), 0).shape == (0,)
    whole = random_bits(torch.tensor(5), 40)
    for start in range(9):
        assert torch.equal(random_bits(torch.tensor(5), 13, start), whole[start : start + 13])
    places = torch.tensor([[39, 0], [7, 7]])
    assert torch.equal(random_bits_at(torch.tensor(5), places), whole[places])


def test_seeds_are_drawn_from_all_64_bits() -> None:
    """Each bit is set in half of 400 of them: within 5 standard errors, 2.5 % each."""
    drawn = torch.stack([draw_seed(torch.device("cpu"), generator(i)) for i in range(400)])
    each = ((drawn[:, None] >> torch.arange(64)) & 1).double().mean(0)
    assert ((each - 0.5).abs() < 0.125).all()


def test_random_bits_are_uniform() -> None:
    """Every bit is set half of the time, and neighbours do not know each other: within 5 standard errors."""
    count = 1 << 16
    bits = random_bits(torch.tensor(1), count)
    assert ((bits >= 0) & (bits < 2**32)).all()
    each = ((bits[:, None] >> torch.arange(32)) & 1).double()
    error = 0.5 / math.sqrt(count)
    assert ((each.mean(0) - 0.5).abs() < 5 * error).all()
    assert (((each[1:] != each[:-1]).double().mean(0) - 0.5).abs() < 5 * error).all()


def test_layout_changes_no_random_number() -> None:
    """A transposed or strided view is rounded as its copy is; so is a part, as far as it is the beginning."""
    x = torch.randn(40, 60)
    for view in (x.t(), x[::2, 3:7], x[:1].expand(5, -1)):
        rounded = [
            round_to_format(v, E4M3, rounding="stochastic", generator=generator(3)) for v in (view, view.contiguous())
        ]
        assert torch.equal(*rounded)
    whole, part = (round_to_format(v, E4M3, rounding="stochastic", generator=generator(3)) for v in (x, x[:7]))
    assert torch.equal(whole[:7], part)


@sweep
def test_default_dtype_changes_nothing(fmt: Format) -> None:
    """A model built under torch.set_default_dtype(bfloat16) casts like any other: random numbers keep 24 bits."""
    x = torch.rand(1 << 12) * fmt.max

    def casts() -> list[Tensor]:
        codes = [encode(x, fmt, rounding=rule, generator=generator(0)) for rule in get_args(Rounding)]
        return [decode(code, fmt) for code in codes]

    before = casts()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert all(map(torch.equal, before, casts()))
    finally:
        torch.set_default_dtype(torch.float32)


def test_options_are_given_by_name() -> None:
    """A third value in its place could be a rounding or a generator."""
    for function in (round_to_format, encode, encode_):
        with pytest.raises(TypeError, match="positional"):
            function(torch.zeros(2), E4M3, "stochastic")  # type: ignore[misc]
        assert function(x=torch.zeros(2), fmt=E4M3).shape == (2,)


# --- refusals and bits -----------------------------------------------------------------------------------------------


@sweep(function=[round_to_format, encode], dtype=[torch.float64, torch.int32, torch.float8_e4m3fn, torch.complex64])
def test_other_dtypes_are_refused(function: Any, dtype: torch.dtype) -> None:
    """fp64 would be rounded twice, integers lose range unseen."""
    with pytest.raises(TypeError, match=f"got {dtype}; needs float32, bfloat16 or float16"):
        function(torch.zeros(2).to(dtype), E4M3)


@sweep(function=[round_to_format, encode])
def test_unknown_rounding_is_refused(fmt: Format, function: Any) -> None:
    """With the nearest name, for every format."""
    with pytest.raises(ValueError, match="unknown rounding 'stochastik'; did you mean 'stochastic'"):
        function(torch.zeros(2), fmt, rounding="stochastik")


def test_codes_of_another_type_are_refused() -> None:
    """Bytes are no E4M3, and E4M3 is no E5M2."""
    for codes, fmt in ((torch.zeros(2, dtype=torch.uint8), E4M3), (torch.zeros(2).to(torch.float8_e4m3fn), E5M2)):
        with pytest.raises(TypeError, match=f"{fmt} codes are held in {fmt.storage_dtype}; got {codes.dtype}"):
            decode(codes, fmt)
    with pytest.raises(TypeError, match=r"E2M1 codes are held in torch\.uint8"):
        decode(torch.zeros(2), E2M1)


def test_four_billion_codes_are_not_listed() -> None:
    """FP32 is decoded, not tabulated."""
    with pytest.raises(ValueError, match=r"FP32 has 2\*\*32 codes"):
        code_values(FP32)


def test_floor_log2_is_exact() -> None:
    """Against math.frexp, for random bit patterns and just below every power of two, where log2 in fp32 rounds up."""
    powers = torch.tensor([2.0**k for k in range(-149, 128)])
    x = torch.cat([fp32_bit_patterns()[-20000:], powers, torch.nextafter(powers, torch.zeros_like(powers)), -powers])
    x = x[x.isfinite() & (x != 0)]
    assert floor_log2(x).tolist() == [math.frexp(value)[1] - 1 for value in x.tolist()]
    assert floor_log2(torch.tensor([0.0, math.inf, math.nan])).tolist() == [-1023, 1024, 1024]


def test_power_of_two_is_exact() -> None:
    """Every exponent of a normal fp64 number, against math.ldexp."""
    exponents = range(-1022, 1024)
    assert power_of_two(torch.tensor(exponents)).tolist() == [math.ldexp(1.0, k) for k in exponents]
