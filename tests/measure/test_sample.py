"""Which rows of a tensor are measured: all equally often, and what is said of them is what the whole says of them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

import ottava
from layout_samples import tiles
from ottava.kernels.native import measure as native_sample
from ottava.kernels.native.measure import Look
from ottava.measure.sample import sample_bands, sampled, squares_of, take_bands
from ottava.measure.tally import Tally, tally_fields
from ottava.measure.walk import Packed, measure_all, survey
from ottava.numerics.scaling import BLOCK_16X16, BLOCK_128X128, Granularity
from ottava.numerics.tensor import QuantizationSpec, QuantizedTensor
from sweep import sweep

E4M3 = QuantizationSpec(ottava.E4M3)
PHASES = 1 << 12


def tally_of(look: Look) -> Tally:
    packed = measure_all([look])
    return Packed(packed.sums[0], packed.extremes[0]).tally()


def look_at(x: Tensor, cast: QuantizationSpec | QuantizedTensor) -> Look:
    return Look(x, cast, survey(x))


# --- rows -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [128, 16, 1])
@pytest.mark.parametrize("every", [1, 2, 3, 7, 16, 48, 64, 1000])
def test_every_row_is_seen_once_in_so_many_looks(every: int, step: int) -> None:
    """Of any number of rows; never fewer than 32 at a look where there are so many, and one band at a time."""
    for rows in (1, 31, 63, 64, 65, 127, 128, 129, 255, 300, 512, 513, 740, 896, 1152, 2048, 5000, 20000):
        looks = []
        for phase in range(PHASES):
            bands = sample_bands(rows, every, phase, step=step)
            if bands is None:
                assert every == 1 or rows < 64
                break
            if phase and bands == looks[0]:
                break
            looks.append(bands)
        seen = [row for bands in looks for band in bands for row in band]
        assert not looks or sorted(seen) == list(range(rows))
        for bands in looks:
            assert all(
                band.start // 128 == band[-1] // 128 and 128 % band.step == 0 <= step - band.step for band in bands
            )
            assert sum(map(len, bands)) >= 32
            assert [band.start for band in bands] == sorted(band.start for band in bands)


@pytest.mark.parametrize(
    "rows, every, rate", [(2048, 16, 16), (512, 16, 16), (1536, 16, 16), (256, 16, 8), (128, 16, 4)]
)
def test_the_rate_is_the_one_asked_for(rows: int, every: int, rate: int) -> None:
    """From 32 * every rows on, of x and of its flat transpose alike; below that 32 rows."""
    for phase in range(2 * every):
        bands = sample_bands(rows, every, phase)
        assert bands is not None
        assert sum(map(len, bands)) * rate == rows


# --- what is taken ----------------------------------------------------------------------------------------------------


def in_torch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(native_sample, "supports_take", lambda *_: "not now")


@pytest.mark.parametrize("native", [True, False])
@sweep(shape=[(400, 70), (1100, 140), (130, 129)])
def test_a_sample_of_a_cast_is_those_rows_of_it(
    spec: QuantizationSpec, shape: tuple[int, int], native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers and scales, in memory of their own: of x, of x.T, of casts that lie in columns."""
    rows, cols = shape
    granularity = spec.granularity
    if not native:
        in_torch(monkeypatch)
    for x in (tiles(rows, cols, torch.bfloat16), tiles(cols, rows, torch.float32).t()):
        look = look_at(x, ottava.quantize(x, spec))
        assert isinstance(look.cast, QuantizedTensor)
        for phase in (0, 3, 10):
            part = sampled(look, 8, phase)
            if granularity.rows is not None and 128 % granularity.rows:
                assert part is None
                continue
            bands = sample_bands(rows, 8, phase, step=granularity.rows if granularity.rows not in (None, 1) else 128)
            assert part is not None
            assert bands is not None
            taken = [row for band in bands for row in band]
            assert isinstance(part.cast, QuantizedTensor)
            assert torch.equal(part.x, x[taken])
            assert part.x.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
            assert torch.equal(part.cast.dequantize(), look.cast.dequantize()[taken])
            lower = part.cast.spec.granularity
            assert part.cast.scale_inv.shape == lower.grid_shape((len(taken), cols))
            if bands[0].step > 1:
                assert part.squares is not None
                assert torch.equal(part.squares, squares_of(x, bands))


def test_amaxes_of_blocks_are_of_all_their_rows() -> None:
    """Also of those that are not taken; what is not finite is left out, a last block may be small."""
    x = torch.zeros(300, 200)
    x[3, 5], x[127, 128], x[299, 0], x[7, 7], x[140, 140] = -9.0, 2.0, 5.0, math.inf, 77.0
    assert squares_of(x, [range(0, 128, 4), range(256, 300, 4)]).tolist() == [[9.0, 2.0], [5.0, 0.0]]


@pytest.mark.parametrize("native", [True, False])
def test_a_sample_is_taken_in_another_dtype(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As autocast has it: rounded, amaxes of blocks too, where numbers become infinite in it as well."""
    if not native:
        in_torch(monkeypatch)
    x = torch.randn(512, 300) * 3e4
    for dtype in (torch.bfloat16, torch.float16):
        part, direct = sampled(look_at(x, E4M3), 16, 5, dtype), sampled(look_at(x.to(dtype), E4M3), 16, 5)
        assert part is not None
        assert direct is not None
        assert part.squares is not None
        assert direct.squares is not None
        assert part.x.dtype == dtype
        assert torch.equal(part.x, direct.x)
        assert torch.equal(part.squares, direct.squares)
        assert part.squares.isfinite().all()


def test_blocks_that_are_still_to_be_cast_are_taken_whole() -> None:
    """Their scales are of all of their rows."""
    x = tiles(700, 200, torch.bfloat16)
    for granularity in (BLOCK_128X128, BLOCK_16X16):
        part = sampled(look_at(x, QuantizationSpec(ottava.E4M3, granularity)), 16, 2)
        assert part is not None
        assert torch.equal(part.x, x[256:384])
    assert sampled(look_at(x, QuantizationSpec(ottava.E4M3, Granularity(3, 5))), 16, 0) is None


@sweep
def test_taking_rows_copies_them_in_every_layout(matrix: Tensor) -> None:
    """Whatever the strides; also no columns at all."""
    if matrix.shape[0] < 2:
        return
    bands = [range(0, matrix.shape[0], 2)]
    assert torch.equal(take_bands(matrix, bands).nan_to_num(7), matrix[::2].nan_to_num(7))


# --- what is said of them ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows, cols, every", [(640, 200, 8), (300, 129, 16), (128 * 9 + 70, 40, 16)])
@sweep
def test_all_looks_together_are_the_whole(
    granularity: Granularity, dtype: torch.dtype, rows: int, cols: int, every: int
) -> None:
    """Counts and histograms add up to those of the full walk exactly, 128x128 blocks among them, sums to 1e-12: no row
    is measured otherwise because its neighbours were passed over, and on average a sample says what the whole does."""
    if granularity.rows is not None and 128 % granularity.rows:
        return
    x = tiles(rows, cols, dtype)
    x[::3] *= 2.0**-9
    x[7, 3], x[rows - 1, cols - 1] = math.inf, math.nan
    look = look_at(x, ottava.quantize(x, QuantizationSpec(ottava.E4M3, granularity)))
    whole, merged, count, blocks = tally_of(look), Tally(), 0, []
    while (part := sampled(look, every, count)) is not None and (not count or not torch.equal(part.x, blocks[0])):
        merged, count, blocks = merged + tally_of(part), count + 1, [*blocks, part.x][:1]
    assert count > 2
    assert merged.n_total == count * whole.n_total
    assert merged.amin == whole.amin
    for f in tally_fields():
        got, wanted = getattr(merged, f.name), getattr(whole, f.name)
        if f.metadata["merge"] != "sum" or f.name in ("n_total", "n_casts", "n_nonfinite") or "scale" in f.name:
            continue
        if f.metadata.get("of_cast") and f.name != "block_spread":
            continue  # a channel is judged by the rows of one look, so looks do not add up to it
        if f.name.startswith("n") or (f.metadata["bins"] and not f.name.startswith("energy")):
            assert np.array_equal(got, wanted), f.name
        else:
            assert np.allclose(got, wanted, rtol=1e-12, atol=1e-12 * np.max(np.abs(whole.sabs))), f.name


def test_estimates_from_samples_mean_those_of_the_whole() -> None:
    """Over 60 matrices whose rows differ by eight decades, first rows of blocks the most, each seen once in a random
    phase: the mean error is within four of its standard deviations, which follow from the spread over all phases."""
    generator = torch.Generator().manual_seed(0)
    errors, variance = {"sxx": 0.0, "n_underflow": 0.0, "see": 0.0}, {"sxx": 0.0, "n_underflow": 0.0, "see": 0.0}
    for _ in range(60):
        decades = 8 * torch.rand(512, 1, generator=generator) - 4 + (torch.arange(512)[:, None] % 32 == 0) * 1.5
        x = torch.randn(512, 48, generator=generator) * 10**decades
        look = look_at(x, ottava.quantize(x, E4M3))
        whole = tally_of(look)
        chosen = int(torch.randint(16, (), generator=generator))
        parts = [tally_of(part) for phase in range(16) if (part := sampled(look, 16, phase)) is not None]
        for name in errors:
            off = [16 * getattr(part, name) / getattr(whole, name) - 1 for part in parts]
            assert np.mean(off) == pytest.approx(0, abs=1e-9)
            errors[name] += off[chosen]
            variance[name] += float(np.var(off))
    for name, error in errors.items():
        assert 0 < abs(error) < 4 * math.sqrt(variance[name]), name


def test_rows_that_are_like_their_neighbours_are_estimated_better_than_by_whole_bands() -> None:
    """A sample lies in several bands: of rows whose size drifts, its estimates spread less than those of one band."""
    generator = torch.Generator().manual_seed(1)
    rows, bands = [], []
    for _ in range(20):
        drift = torch.randn(16, 1, generator=generator).repeat_interleave(128, 0)
        squares = (torch.randn(2048, 8, generator=generator) * drift.exp()).square().sum(1)
        for spread, step in ((rows, 128), (bands, 1)):
            for phase in range(16):
                chosen = sample_bands(2048, 16, phase, step=step)
                assert chosen is not None
                spread.append(
                    float(sum(squares[b.start : b.stop : b.step].sum() for b in chosen) * 16 / squares.sum()) - 1
                )
    assert np.mean(rows) == pytest.approx(0, abs=1e-5)
    assert np.std(rows) < 0.8 * np.std(bands)


def test_a_sample_takes_amax_and_faults_from_the_whole() -> None:
    """The rows that were passed over still count where a single element matters."""
    x = torch.ones(512, 8)
    x[0, 0], x[1, 1] = math.inf, 64.0
    part = sampled(look_at(x, ottava.quantize(x, E4M3, scale=torch.tensor(4.0))), 4, 2)
    assert part is not None
    tally = tally_of(part)
    assert (tally.n, tally.n_total, tally.n_nonfinite, tally.amax) == (128 * 8, x.numel(), 1, 64)


def test_blocks_that_nobody_asks_for_are_not_read() -> None:
    x = torch.randn(1024, 300)
    look = Look(x, ottava.quantize(x, QuantizationSpec(ottava.E4M3)), survey(x))
    with_blocks, without = sampled(look, 16, 3), sampled(look, 16, 3, blocks=False)
    assert with_blocks is not None
    assert without is not None
    assert (with_blocks.squares is None, without.squares) == (False, None)
    tallies = [measure_all([part], detail="exponents") for part in (with_blocks, without)]
    assert torch.equal(tallies[0].sums, tallies[1].sums)
