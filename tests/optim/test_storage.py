"""Moments in fewer bytes: COAT's formula and int8 blocks against numpy, and groups without a magnitude to scale by."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from ottava.optim.storage import STORAGES, Stored
from sweep import sweep

F32 = np.float32
SHAPES = ((1,), (128,), (129,), (3, 50), (2048,), (5, 1000), (0,), ())
GROUPED = ("fp8", "int8")


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


def test_expansion_is_better_than_a_scale_for_each_group() -> None:
    x = torch.randn(256, 128)
    plain = (x / x.abs().amax(1, keepdim=True) * 448).to(torch.float8_e4m3fn).float() * x.abs().amax(1, True) / 448
    assert (kept("fp8", x)[1] - x).square().mean() < (plain - x).square().mean() / 2


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


def test_bytes_of_each_storage() -> None:
    x = torch.zeros(4096)
    sizes = {name: sum(t.nbytes for t in storage.empty(x).values()) / 4096 for name, storage in STORAGES.items()}
    assert sizes == pytest.approx({"fp32": 4.0, "bf16": 2.0, "fp8": 1 + 5 / 128, "int8": 1 + 4 / 2048})
