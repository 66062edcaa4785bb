"""Moments in fewer bytes: COAT's formula and int8 blocks against numpy, and groups without a magnitude to scale by."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ottava.numerics.formats import E4M3, E5M2
from ottava.numerics.scaling import BLOCK_128X128, PER_ROW, PER_TENSOR
from ottava.numerics.tensor import QuantizationSpec
from ottava.optim import SGD, AdamW
from ottava.optim.storage import STORAGES, Stored, _joined, _restored, _split
from ottava.weights.parameter import quantized_weight
from sweep import sweep

F32 = np.float32
SHAPES = ((1,), (128,), (129,), (3, 50), (2048,), (5, 1000), (0,), ())
GROUPED = ("fp16", "fp8", "int8")


def kept(name: str, x: Tensor, *, positive: bool = False) -> tuple[Stored, Tensor]:
    """What a storage keeps of x, and what it reads back."""
    stored = STORAGES[name].empty(x)
    STORAGES[name].write([stored], [x.clone()], positive=positive)
    (back,) = STORAGES[name].read([stored], positive=positive)
    return stored, back.view(x.shape)


def coat(x: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], float, float]:
    """One group of dynamic range expansion, in fp64: (decoded, center, exponent)."""
    magnitude = np.abs(x.astype(np.float64))
    least, most = magnitude[magnitude > 0].min(), magnitude.max()
    exponent = np.floor(16 * np.log2(448.0**2 / 2) / np.log2(most / least)) / 16
    exponent = min(max(exponent, 1 / 16), 255 / 16)
    center = np.sqrt(least * most)
    codes = (np.sign(x) * (magnitude / center) ** exponent).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    return np.sign(codes) * np.abs(codes) ** (1 / exponent) * center, center, exponent


@sweep(spread=(0.0, 0.1, 1.0, 5.0))
def test_range_expansion_is_coats_formula(spread: float) -> None:
    """A code may differ where the witness is a tie within fp32's errors: the next code is at most 2**-3 / k away."""
    x = torch.randn(64, 128) * torch.exp(spread * torch.randn(64, 128))
    x[3, 17] = 0.0
    stored, back = kept("fp8", x)
    for row in range(64):
        wanted, center, exponent = coat(x[row].numpy())
        assert abs(float(stored["_center"][row]) / center - 1) < 2**-21
        assert abs(float(stored["_exponent"][row]) / 16 - exponent) <= 1 / 16, "a floor, of a log2 in fp32"
        error = np.abs(back[row].numpy() - wanted) / np.where(wanted == 0, 1, np.abs(wanted))
        if float(stored["_exponent"][row]) / 16 == exponent:
            assert np.mean(error > 1e-5) < 0.01
            assert error.max() < 2 ** (2 / exponent) - 1
    relative = (back - x).abs()[x != 0] / x.abs()[x != 0]
    smallest = float(stored["_exponent"].min()) / 16
    assert relative.max() <= 1.5 ** (1 / smallest) - 1, "a subnormal code is at most a half off before the root"
    assert (back == 0).equal(x == 0)


@sweep(positive=(False, True), shape=SHAPES)
def test_int8_blocks_are_steps_of_their_amax(positive: bool, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape).exp() if positive else torch.randn(shape)
    stored, back = kept("int8", x, positive=positive)
    flat = x.numpy().reshape(-1)
    for block in range(-(-x.numel() // 2048)):
        one = flat[2048 * block : 2048 * (block + 1)]
        root, top = (np.sqrt(one), 254) if positive else (one, 127)
        step = F32(np.abs(root).max()) / F32(top)
        codes = np.maximum(np.rint(root / step), 1) if positive else np.rint(root / step)
        wanted = (codes.astype(F32) * step) ** (2 if positive else 1)
        got = back.reshape(-1)[2048 * block : 2048 * (block + 1)].numpy()
        np.testing.assert_allclose(got, wanted, rtol=2**-22)
        assert float(stored["_amax"][block]) == np.abs(root).max()


@sweep(name=tuple(STORAGES), shape=SHAPES, positive=(False, True))
def test_zero_and_constant_groups_are_exact(name: str, shape: tuple[int, ...], positive: bool) -> None:
    """TransformerEngine's FP8 states become NaN when they are zero; COAT's kernel gives infinity for equal numbers."""
    for value in (0.0, 1.0, 3.7e-12, 2.0**-100):
        x = torch.full(shape, value)
        back = kept(name, x, positive=positive)[1]
        bound = 2.0**-9 if name == "bf16" else 2.0**-20
        assert torch.allclose(back, x, rtol=bound, atol=0), value
    assert STORAGES[name].read([STORAGES[name].empty(torch.ones(shape))], positive=positive)[0].eq(0).all()


@sweep(name=tuple(STORAGES), positive=(False, True), bad=(math.inf, -math.inf, math.nan))
def test_what_is_not_finite_stays_so_and_hurts_nothing_else(name: str, positive: bool, bad: float) -> None:
    x = torch.rand(2, 2048) + 0.5
    clean = kept(name, x, positive=positive)[1]
    x[0, 100] = bad
    back = kept(name, x, positive=positive)[1]
    assert not back[0, 100].isfinite()
    x[0, 100] = clean[0, 100] = back[0, 100] = 1.0
    assert (back - x).abs().max() <= max(2 * float((clean - x).abs().max()), 2.0**-7)


@sweep(name=GROUPED)
def test_a_positive_number_never_becomes_zero(name: str) -> None:
    """It is a denominator: the update would be thousands of times too large."""
    x = torch.exp(8 * torch.randn(64, 2048))
    x[::2, ::3] = 0.0
    back = kept(name, x, positive=True)[1]
    assert (back > 0).equal(x > 0)


@sweep(name=tuple(STORAGES), shape=SHAPES, positive=(False, True), spread=(0.0, 1.0, 12.0))
def test_numbers_read_are_stored_as_the_same_codes(
    name: str, shape: tuple[int, ...], positive: bool, spread: float
) -> None:
    """With the scales that are there: a state saved in FP32 is the state."""
    x = torch.exp(spread * torch.randn(shape)) * (1 if positive else torch.randn(shape).sign())
    stored, back = kept(name, x, positive=positive)
    again = {name: value.clone() for name, value in stored.items()}
    STORAGES[name].write([again], [back.clone()], positive=positive, keep=True)
    assert all(again[key].view(torch.uint8).equal(stored[key].view(torch.uint8)) for key in stored if x.dim())


@sweep(name=GROUPED)
def test_several_states_at_once_are_each_alone(name: str) -> None:
    xs = [torch.randn(shape) for shape in SHAPES]
    stored = [STORAGES[name].empty(x) for x in xs]
    STORAGES[name].write(stored, [x.clone() for x in xs], positive=False)
    for x, one, back in zip(xs, stored, STORAGES[name].read(stored, positive=False), strict=True):
        alone = kept(name, x)
        assert all(value.equal(one[key]) for key, value in alone[0].items())
        assert alone[1].reshape(-1).equal(back)


# --- weights ---

WEIGHTS = ((33, 17), (5,), (), (0, 3), (300, 70))


def twins(values: list[Tensor], **options: Any) -> tuple[list[nn.Parameter], AdamW]:
    parameters = [nn.Parameter(value.clone()) for value in values]
    return parameters, AdamW(parameters, lr=1e-3, weight_decay=0.1, **options)


def step(optimizers: list[Any], scale: float = 1.0) -> None:
    """One step of several optimizers with the same random gradients."""
    shapes = [p.shape for group in optimizers[0].param_groups for p in group["params"]]
    gradients = [scale * torch.randn(shape) for shape in shapes]
    for optimizer in optimizers:
        mine = [p for group in optimizer.param_groups for p in group["params"]]
        for parameter, gradient in zip(mine, gradients, strict=True):
            parameter.grad = gradient.to(parameter.dtype)
        optimizer.step()


def test_masters_are_an_fp32_adamw_bit_for_bit() -> None:
    """Given the same gradients: torch's on FP32 weights, an FP32 master, and BF16 with a remainder."""
    start = [torch.randn(shape).bfloat16() for shape in WEIGHTS]
    wide = [nn.Parameter(value.float()) for value in start]
    reference = torch.optim.AdamW(wide, lr=1e-3, weight_decay=0.1, foreach=True)
    (mastered, fp32), (split, remainder) = twins(start, master="fp32"), twins(start, master="remainder")
    for _ in range(60):
        for parameter in wide:
            parameter.grad = torch.randn_like(parameter).bfloat16().float()
        for other in (mastered, split):
            for parameter, source in zip(other, wide, strict=True):
                parameter.grad = source.grad.bfloat16()  # type: ignore[union-attr]
        for optimizer in (reference, fp32, remainder):
            optimizer.step()
        for parameter, one, two in zip(wide, mastered, split, strict=True):
            assert torch.equal(fp32.state[one]["master"], parameter)
            assert torch.equal(one, parameter.bfloat16())
            assert torch.equal(_joined(two.data, remainder.state[two]["remainder"]), parameter)
            tie = parameter.detach().view(torch.int32) & 0xFFFF == 0x8000
            assert torch.equal(two[~tie], one[~tie])


def test_a_remainder_restores_every_fp32_number() -> None:
    bits = torch.randint(-(2**31), 2**31 - 1, (200_000,), dtype=torch.int32)
    specials = torch.tensor([0, 0x7F800000, 0x7F7FFFFF, 0x00000001, 0x3F808000, 0x3F818000], dtype=torch.int32)
    value = torch.cat([bits, specials, -specials]).view(torch.float32)
    weight, remainder = torch.empty_like(value, dtype=torch.bfloat16), torch.empty_like(value, dtype=torch.int16)
    _split(value, weight, remainder)
    number = ~value.isnan()
    assert _joined(weight, remainder)[number].view(torch.int32).equal(value[number].view(torch.int32))
    assert _joined(weight, remainder)[~number].isnan().all()
    assert weight[~number].isnan().all()
    tie = value.view(torch.int32) & 0xFFFF == 0x8000
    assert weight[number & ~tie].equal(value.bfloat16()[number & ~tie])


def test_without_a_master_small_updates_are_lost_and_stochastic_rounding_keeps_them() -> None:
    """An update of a 1/16 ulp: rounded to the nearest the weight stays; at random it moves as far on average."""
    ends = {}
    for stochastic in (False, True):
        weight = nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
        optimizer = SGD([weight], lr=2.0**-12, stochastic_rounding=stochastic)
        for _ in range(64):
            weight.grad = -torch.ones_like(weight)
            optimizer.step()
        ends[stochastic] = weight.detach().double()
    assert bool((ends[False] == 1).all())
    exact, spread = 1 + 64 * 2.0**-12, 2.0**-7 / 4096**0.5
    assert abs(float(ends[True].mean()) - exact) < 6 * spread * 64**0.5 * 0.25


def test_stochastic_bits_are_philox() -> None:
    """Against numpy: element i adds the upper half of word i % 4 of philox(i // 4, key = (place, step))."""
    weight = nn.Parameter(torch.ones(37, dtype=torch.bfloat16))
    weight.grad = torch.linspace(-1, 1, 37).bfloat16()
    optimizer = SGD([nn.Parameter(torch.ones(1)), weight], lr=1e-2, stochastic_rounding=True)
    optimizer.step()
    exact = (np.float32(1) + np.float32(-1e-2) * weight.grad.float().numpy()).view(np.uint32)
    words = []
    for number in range(10):
        a, b, c, d, first, second = number, 0, 0, 0, 1, 1  # place 1, step 1
        for _ in range(10):
            low, high = a * 0xD2511F53, c * 0xCD9E8D57
            a, b = (high >> 32) ^ b ^ first, high & 0xFFFFFFFF
            c, d = (low >> 32) ^ d ^ second, low & 0xFFFFFFFF
            first, second = (first + 0x9E3779B9) % 2**32, (second + 0xBB67AE85) % 2**32
        words += [a, b, c, d]
    wanted = ((exact + (np.array(words[:37], dtype=np.uint32) >> 16)) & 0xFFFF0000).view(np.float32)
    assert np.array_equal(weight.detach().float().numpy(), wanted)


def test_equal_places_of_two_parameters_draw_other_bits() -> None:
    """In one optimizer by their places in it; in two by their names, wrapped or not."""

    def rounded(*optimizers: SGD) -> list[Tensor]:
        parameters = [p for one in optimizers for p in one.param_groups[0]["params"]]
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 2.0**-9)
        for one in optimizers:
            one.step()
        return [p.detach().float() for p in parameters]

    def ones(name: str) -> tuple[str, nn.Parameter]:
        return name, nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))

    options = {"lr": 1.0, "stochastic_rounding": True}
    pairs = (
        rounded(SGD([ones("a")[1], ones("b")[1]], **options)),
        rounded(SGD([ones("a.weight")], **options), SGD([ones("b.weight")], **options)),
    )
    for one, two in pairs:
        assert 0.4 < float((one == 1).float().mean()) < 0.6
        assert 0.4 < float((one == two).float().mean()) < 0.6
    wrapped = rounded(SGD([ones("module.a._orig_mod.weight")], **options))
    assert torch.equal(wrapped[0], pairs[1][0])


@sweep(granularity=(PER_TENSOR, PER_ROW, BLOCK_128X128), fmt=(E4M3, E5M2), master=("fp32", "remainder"))
def test_fp8_weights_follow_their_master(granularity: Any, fmt: Any, master: str) -> None:
    """The codes are those of the master of an FP32 AdamW; the remainder's master is as near as its 16 bits allow."""
    exact = torch.randn(130, 200) / 30
    spec = QuantizationSpec(fmt, granularity)
    weight = nn.Parameter(quantized_weight(exact.bfloat16(), spec, keep_high_precision=True))
    plain = nn.Parameter(exact.bfloat16().float())
    optimizer = AdamW([weight], lr=1e-3, weight_decay=0.1, master=master)
    reference = torch.optim.AdamW([plain], lr=1e-3, weight_decay=0.1, foreach=True)
    largest = plain.detach().abs()
    for _ in range(20):
        plain.grad = torch.randn_like(plain).bfloat16().float()
        weight.grad = plain.grad.bfloat16()
        optimizer.step()
        reference.step()
        largest = torch.maximum(largest, plain.detach().abs())
    assert weight.high_precision is None
    wanted = quantized_weight(plain.detach().bfloat16(), spec)
    if master == "fp32":
        assert torch.equal(optimizer.state[weight]["master"], plain)
        assert torch.equal(weight.codes.view(torch.uint8), wanted.codes.view(torch.uint8))
        assert torch.equal(weight.scale_inv, wanted.scale_inv)
        assert optimizer.state[weight]["master"].nbytes == 4 * weight.numel()
    else:
        master_now = _restored(weight.data, optimizer.state[weight]["remainder"])
        unit = fmt.eps * largest + wanted.scale_inv.max() * fmt.min_subnormal  # at least an ulp of the code
        assert bool(((master_now - plain).abs() <= 20 * 2.0**-16 * unit * 1.1).all()), "half a unit in each step"
        assert optimizer.state[weight]["remainder"].nbytes == 2 * weight.numel()


def test_a_master_starts_from_the_values_before_the_cast() -> None:
    """TransformerEngine #1121: a master made of the codes keeps their error, some 2 % of each weight, for ever."""
    exact = torch.randn(64, 64).bfloat16()
    errors = {}
    for keep in (True, False):
        weight = nn.Parameter(quantized_weight(exact, QuantizationSpec(E4M3), keep_high_precision=keep))
        optimizer = AdamW([weight], lr=0.0, weight_decay=0.0, master="fp32")
        weight.grad = torch.zeros(64, 64, dtype=torch.bfloat16)
        optimizer.step()
        errors[keep] = float((optimizer.state[weight]["master"] - exact).norm() / exact.norm())
    assert errors[True] == 0
    assert 0.01 < errors[False] < 0.05


def test_options_that_do_not_fit_are_refused() -> None:
    bf16 = nn.Parameter(torch.ones(2, 2).bfloat16())
    half = nn.Parameter(torch.ones(2).half())
    fp8 = nn.Parameter(quantized_weight(torch.ones(2, 2), QuantizationSpec(E4M3)))
    for parameter, options, words in (
        (bf16, {"master": "fp16"}, "unknown master 'fp16'; did you mean 'fp32'"),
        (bf16, {"master": "fp32", "stochastic_rounding": True}, "without a master"),
        (bf16, {"moments": "int9"}, "unknown moments 'int9'; did you mean 'int8'"),
        (half, {"master": "remainder"}, "got torch.float16: use master='fp32'"),
        (half, {"stochastic_rounding": True}, "got torch.float16"),
        (fp8, {}, "needs|use master='fp32' or 'remainder'"),
    ):
        with pytest.raises(ValueError, match=words):
            AdamW([parameter], **options)  # type: ignore[arg-type]
    for parameter in (nn.Parameter(torch.ones(2, dtype=torch.complex64)), torch.ones(2, 2).to_sparse()):
        with pytest.raises(TypeError, match="Leave it to an optimizer of torch"):
            AdamW([parameter])
