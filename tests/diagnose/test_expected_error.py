"""Predicted errors against those of real casts, for every recipe; bounds as docs of `what_if` publish them."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

import ottava
from ottava.diagnose.expected_error import current_scale, expect
from ottava.measure.tally import Tally, tally_fields
from ottava.measure.walk import measure
from ottava.numerics.formats import E4M3, E5M2, FORMATS
from ottava.numerics.scaling import PER_ROW, Granularity
from ottava.numerics.tensor import QuantizationSpec
from ottava.recipe import GEMMS, RECIPES

ROWS, COLS = 256, 512


def rows_of(*tallies: Tally) -> Tally:
    """A table of tallies."""
    return Tally(**{f.name: np.stack([np.asarray(getattr(t, f.name)) for t in tallies]) for f in tally_fields()})


def swiglu(massive: float) -> Tensor:
    """What enters FC2, four tokens of it massive (facts: SwiGLU outliers, massive activations)."""
    x = torch.nn.functional.silu(torch.randn(ROWS, COLS)) * torch.randn(ROWS, COLS)
    x[:4] *= massive
    return x


TENSORS = {
    "gaussian": lambda: torch.randn(ROWS, COLS),
    "lognormal": lambda: torch.randn(ROWS, COLS).mul(1.5).exp() * torch.randn(ROWS, COLS).sign(),
    "gradient": lambda: 1e-9 * torch.randn(ROWS, COLS).mul(2.2).exp() * torch.randn(ROWS, COLS).sign(),
    "channels": lambda: torch.randn(ROWS, COLS) * torch.where(torch.arange(COLS) % 100 == 7, 300.0, 1.0),
    "tokens": lambda: torch.randn(ROWS, COLS) * torch.randn(ROWS, 1).mul(3).exp(),
    "swiglu": lambda: swiglu(1.0),
    "swiglu 1e4": lambda: swiglu(1e4),
    "swiglu 1e5": lambda: swiglu(1e5),
}
SPECS = {
    str(spec): spec
    for recipe in RECIPES.values()
    for gemm in GEMMS
    for spec in (getattr(recipe, gemm).lhs, getattr(recipe, gemm).rhs)
    if spec is not None and not spec.predicted and spec.transform is None and spec.block_scale == "amax"
}


def decibels(ratio: float) -> float:
    """-10 log10."""
    return -10 * math.log10(ratio) if ratio else math.inf


@pytest.mark.parametrize("name", TENSORS)
def test_agrees_with_real_casts_in_every_cell_of_every_recipe(name: str) -> None:
    """From the histograms of a cast to E5M2, which is none of the specs asked about but one."""
    torch.manual_seed(0)
    x = TENSORS[name]().bfloat16()
    recorded = rows_of(measure(x, ottava.quantize(x, QuantizationSpec(E5M2))))
    for spec in SPECS.values():
        x_q = ottava.quantize(x, spec)
        real, said = measure(x, x_q), expect(recorded, spec)
        assert said is not None
        narrow = spec.format.bits < 8  # blocks of 1x16 and 16x16 are not recorded
        assert said.elements[0] == real.n_nonzero
        assert said.signal[0] == pytest.approx(real.sxx, rel=0.05)
        underflow = 100 * abs(said.flushed[0] - real.n_underflow) / real.n_nonzero
        assert underflow < (15 if narrow else 1.0), spec
        assert abs(said.clipped[0] - real.n_overflow) / real.n < 0.005, spec
        relative = abs(said.relative[0] - real.srel) / real.n_nonzero
        # stochastic rounding is drawn, 64 times a bin: small numbers that are rounded up make a heavy tail
        drawn = spec.rounding == "stochastic"
        assert relative < (0.2 if drawn else 0.15 if narrow else 0.006), spec
        if narrow:
            continue
        exact = x.double()
        error = ((exact - x_q.dequantize(torch.float32).double()) / exact)[exact != 0]
        element = decibels(said.relative_squared[0] / said.elements[0])
        assert element == pytest.approx(decibels(error.square().mean().item()), abs=0.5), spec
        assert decibels(said.noise[0] / said.signal[0]) == pytest.approx(decibels(real.see / real.sxx), abs=1.5), spec


def test_energy_is_in_the_blocks_near_the_top() -> None:
    """Two-level scales lose quiet blocks; those hold no energy, so the SQNR is that of the loud ones."""
    torch.manual_seed(0)
    x, spec = TENSORS["tokens"](), SPECS["E2M1[1x16, e4m3]"]
    real = measure(x, ottava.quantize(x, spec))
    said = expect(rows_of(real), spec)
    assert said is not None
    assert real.n_underflow / real.n_nonzero > 0.1
    assert decibels(said.noise[0] / said.signal[0]) == pytest.approx(decibels(real.see / real.sxx), abs=1.0)


def test_the_failure_that_sqnr_does_not_see() -> None:
    """Massive tokens: SQNR stays where it was, underflow and element SQNR do not; rows cure it (facts, 3.6)."""
    torch.manual_seed(0)
    x = swiglu(1e5)
    recorded = rows_of(measure(x, ottava.quantize(x, QuantizationSpec(E5M2))))
    tensor, row = expect(recorded, QuantizationSpec(E4M3)), expect(recorded, QuantizationSpec(E4M3, PER_ROW))
    assert tensor is not None
    assert row is not None
    assert decibels(tensor.noise[0] / tensor.signal[0]) > 30
    assert tensor.flushed[0] / tensor.elements[0] > 0.5
    assert decibels(tensor.relative_squared[0] / tensor.elements[0]) < 3
    assert row.flushed[0] / row.elements[0] < 0.001


def test_a_few_outliers_are_followed_exactly_where_their_scale_is_known() -> None:
    """One element holds all energy: its error is that of a cast of just it."""
    x = torch.full((64, 64), 1e-3)
    x[3, 5] = 0.3  # BF16's nearest, times no power of two an E4M3 number
    for spec in (QuantizationSpec(E4M3, scale_format="pow2"), QuantizationSpec(E4M3, PER_ROW, scale_format="pow2")):
        real = measure(x, ottava.quantize(x, spec))
        said = expect(rows_of(real), spec)
        assert said is not None
        rest = (x < 0.1).sum().item() * 1e-6 * 0.0625**2  # of all others, at most half an eps each
        assert said.noise[0] == pytest.approx(real.see, abs=rest), spec


def test_a_predicted_scale_clips_as_the_cast_would() -> None:
    """Four octaves too large a scale: facts 3.7 measured 2.3 dB and 1/16."""
    torch.manual_seed(0)
    x = torch.randn(ROWS, COLS)
    spec = QuantizationSpec(E4M3, scaling="delayed")
    scale = 16 * current_scale(np.array([x.abs().max().item()]), spec)
    real = measure(x, ottava.quantize(x, spec, scale=torch.tensor(scale[0], dtype=torch.float32)))
    said = expect(rows_of(real), spec, scale=scale)
    assert said is not None
    assert said.clipped[0] / real.n == pytest.approx(real.n_overflow / real.n, abs=0.01)
    assert decibels(said.noise[0] / said.signal[0]) == pytest.approx(decibels(real.see / real.sxx), abs=0.3)
    assert decibels(real.see / real.sxx) < 5


def test_rows_of_a_table_do_not_see_each_other() -> None:
    """Each row as if it were alone."""
    torch.manual_seed(0)
    tallies = []
    for scale in (1.0, 1e-12, 1e12):
        x = scale * torch.randn(64, 64)
        tallies.append(measure(x, ottava.quantize(x, QuantizationSpec(E4M3))))
    for spec in (QuantizationSpec(E4M3, scale_format="pow2"), SPECS["E4M3[1x32, e8m0]"], SPECS["E2M1[1x16, e4m3]"]):
        together, alone = expect(rows_of(*tallies), spec), [expect(rows_of(t), spec) for t in tallies]
        for name in ("elements", "flushed", "relative", "noise", "signal"):
            want = [getattr(one, name)[0] for one in alone]
            np.testing.assert_allclose(getattr(together, name), want, rtol=1e-12)


def test_says_so_where_nothing_is_known() -> None:
    """No histograms; or blocks of which nothing is recorded."""
    assert expect(rows_of(Tally(n=4, amax=1.0)), QuantizationSpec(E4M3)) is None
    assert expect(rows_of(Tally(n=4, amax=1.0)), SPECS["E4M3[1x128]"]) is None
    x = torch.randn(8, 8)
    recorded = rows_of(measure(x, ottava.quantize(x, QuantizationSpec(E4M3))))
    assert expect(recorded, RECIPES["averis"].fprop.lhs) is expect(recorded, RECIPES["four_over_six"].fprop.lhs) is None
    tall = replace(QuantizationSpec(E4M3), granularity=Granularity(None, 16))
    assert expect(rows_of(measure(x, ottava.quantize(x, QuantizationSpec(E4M3)))), tall) is None


def test_zeros_are_no_elements() -> None:
    x = torch.zeros(8, 8)
    x[0, 0] = 1.0
    for spec in SPECS.values():
        said = expect(rows_of(measure(x, ottava.quantize(x, QuantizationSpec(E4M3)))), spec)
        assert said is not None
        assert (said.elements[0], said.flushed[0]) == (1, 0), spec


def test_a_tie_at_the_top_goes_where_the_cast_takes_it() -> None:
    """What is expected of one element on either side of it, and on it, is what is measured."""
    for fmt in (f for f in FORMATS.values() if f.signed and f.has_zero and f.bits <= 8):
        spec = QuantizationSpec(fmt, scaling="delayed")
        for x in (torch.tensor([[fmt.clip * (1 + side)]]) for side in (-(2.0**-20), 0.0, 2.0**-20)):
            tally = measure(x, ottava.quantize(x, spec, scale=torch.tensor(1.0)))
            said = expect(rows_of(tally), spec, scale=np.ones(1))
            assert said is not None
            assert said.clipped[0] == tally.n_overflow == fmt.clips(x).item()
