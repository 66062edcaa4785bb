"""The parts of an error: they sum to it, each is what its definition says, and each cause raises its own part."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ottava
from ottava.kernels.native.measure import Look
from ottava.measure.sample import sampled
from ottava.measure.statistics import STATISTICS
from ottava.measure.tally import PARTS, Tally
from ottava.measure.walk import anatomy, measure_all, measure_packed, survey
from ottava.numerics.formats import E2M1, E4M3, E5M2
from ottava.numerics.rounding import code_values
from ottava.numerics.scaling import BLOCK_1X16, BLOCK_1X32, BLOCK_16X16, BLOCK_128X128, PER_ROW, Granularity
from ottava.numerics.tensor import QuantizationSpec, QuantizedTensor

SPECS = (
    QuantizationSpec(E4M3),
    QuantizationSpec(E5M2, PER_ROW, scale_format="pow2"),
    QuantizationSpec(E4M3, BLOCK_128X128),
    QuantizationSpec(E4M3, BLOCK_1X32, scale_format="e8m0_floor"),
    QuantizationSpec(E2M1, BLOCK_16X16, scale_format="e4m3"),
    QuantizationSpec(E2M1, BLOCK_1X16, scale_format="e4m3", rounding="stochastic"),
    QuantizationSpec(E2M1, Granularity(48, 7)),
    QuantizationSpec(E4M3, Granularity(None, 16)),
)


def parts_of(x: Tensor, x_q: QuantizedTensor) -> dict[str, float]:
    """The shares of the parts in percent, as tables have them."""
    tally = measure_packed(x, x_q, detail="anatomy").tally()
    return {name: float(STATISTICS[f"error_{name}_pct"].finish(tally)) for name in PARTS}


def witness(x: Tensor, x_q: QuantizedTensor) -> np.ndarray:
    """dead, clipped, live, grid by the definition: fp64, block after block, neighbours from the table of codes."""
    fmt, shape = x_q.spec.format, (x.shape[0], x.shape[1])
    numbers, q = x.double().numpy(), x_q.dequantize(torch.float64).numpy()
    rows, cols = x_q.spec.granularity.block_shape(shape)
    values = code_values(fmt).double()
    table = np.unique(values[values.isfinite() & (values >= 0)].numpy())
    sums = np.zeros(4)
    for i, top in enumerate(range(0, shape[0], rows)):
        for j, left in enumerate(range(0, shape[1], cols)):
            a, b = (t[top : top + rows, left : left + cols] for t in (numbers, q))
            keep = np.isfinite(a)
            a, b = np.abs(a[keep]), np.abs(b[keep])
            ideal = a.max(initial=0) / fmt.max or 1.0
            high = np.minimum(np.searchsorted(table, a / ideal), len(table) - 1)
            above, below = table[high] * ideal - a, a - table[np.maximum(high - 1, 0)] * ideal
            r = above * below if x_q.spec.rounding == "stochastic" else np.minimum(np.abs(above), np.abs(below)) ** 2
            r = np.where(table[high] * ideal == a, 0, r)
            e = (a - b) ** 2
            dead = (b == 0) & (a > 0)
            clipped = fmt.clips(a, float(x_q.scale_inv[i, j])) & ~dead
            live = ~(dead | clipped)
            sums += [e[dead].sum(), e[clipped].sum(), e[live].sum(), r[live].sum()]
    return sums


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_are_those_of_the_definition_and_sum_to_the_error(dtype: torch.dtype) -> None:
    """Every block shape, odd shapes, both roundings, clipping scales, non-finite elements; sums within 1e-12."""
    torch.manual_seed(0)
    for rows, cols in ((150, 70), (1, 33), (129, 16)):
        x = (torch.randn(rows, cols) * torch.logspace(-6, 3, cols)).to(dtype)
        x[0, :3] = torch.tensor([0.0, math.nan, math.inf])
        for spec in SPECS:
            cast = ottava.quantize(torch.where(x.isfinite(), x, 0), spec)
            for x_q in (cast, replace(cast, scale_inv=cast.scale_inv * 0.37)):
                found = anatomy(Look(x, x_q, survey(x)), x_q)
                ours = [float(found[f"error_{name}"]) for name in ("dead", "clipped", "live", "grid")]
                wanted = witness(x, x_q)
                assert np.allclose(ours, wanted, rtol=1e-9, atol=1e-11 * wanted.sum()), spec
                tally = measure_packed(x, x_q, detail="anatomy").tally()
                e = torch.where(x.isfinite(), x.double() - x_q.dequantize(torch.float64), 0)
                total = float(e.square().sum())
                parts = (tally.error_dead, tally.error_clipped, tally.error_live - tally.error_grid, tally.error_grid)
                assert math.isclose(sum(parts), total, rel_tol=1e-12), spec
                assert sum(tally.blocks_by_part) <= x_q.scale_inv.numel()
                merged = tally + measure_packed(x, x_q, detail="anatomy").tally()
                assert math.isclose(merged.error_live, 2 * tally.error_live)


def test_each_cause_raises_its_own_part() -> None:
    """The same numbers under four scales: plain, far too coarse, too low, and rounded to powers of two."""
    torch.manual_seed(0)
    x = torch.randn(256, 512)
    fits = float(x.abs().max()) / E4M3.max
    given = {factor: ottava.quantize(x, SPECS[0], scale=torch.full((1, 1), factor / fits)) for factor in (1, 2**-19, 4)}
    blocks = QuantizationSpec(E2M1, BLOCK_1X32)
    powers = replace(blocks, scale_format="e8m0")
    shares = {
        "grid": parts_of(x, given[1]),
        "dead": parts_of(x, given[2**-19]),
        "clipped": parts_of(x, given[4]),
        "scale": parts_of(x, ottava.quantize(x, powers)),
    }
    for part in ("grid", "dead", "clipped"):
        assert shares[part][part] > 95, shares
    plain = parts_of(x, ottava.quantize(x, blocks))
    assert shares["scale"]["scale"] > 10 > 1 > abs(plain["scale"]), (shares, plain)
    assert max(s["scale"] for s in (shares["grid"], shares["clipped"])) < 1
    for part, share in shares.items():
        assert math.isclose(sum(share.values()), 100), part
        others = [s[part] for cause, s in shares.items() if cause != part]
        assert part == "grid" or share[part] > 1.5 * max(others), (part, shares)


def test_blocks_are_counted_by_their_largest_part() -> None:
    """A block that flushes, one that clips, one that rounds, one without an error."""
    x = torch.tensor([[1e-4] * 16 + [100.0] * 16 + [1.2] * 16 + [0.0] * 16])
    cast = ottava.quantize(x, QuantizationSpec(E2M1, BLOCK_1X16), scale=torch.ones(1, 1))
    found = anatomy(Look(x, cast, survey(x)), cast)
    assert found["blocks_by_part"].tolist() == [1, 1, 1, 0]  # 1.2 is exact under its ideal scale
    tally = Tally(blocks_by_part=found["blocks_by_part"].numpy())
    shares = [float(STATISTICS[f"blocks_{name}_pct"].finish(tally)) for name in ("dead", "clipped", "scale")]
    assert shares == pytest.approx([100 / 3] * 3)
    assert math.isnan(STATISTICS["error_dead_pct"].finish(Tally())), "without anatomy nothing is known"


def test_a_watch_and_an_observation_find_the_parts_of_whole_blocks() -> None:
    """A sample keeps all rows of a block; casts that are still to be made are made once."""
    torch.manual_seed(0)
    x, spec = torch.randn(1024, 64), SPECS[4]
    look = sampled(Look(x, spec, survey(x)), 16, 0, complete=True)
    made = sampled(Look(x, ottava.quantize(x, spec), survey(x)), 16, 0, complete=True)
    assert look is not None
    assert made is not None
    assert isinstance(made.cast, QuantizedTensor)
    assert made.cast.spec == spec
    for one in (look, made):
        tally = measure_all([one], detail="anatomy")
        assert tally.sums.shape == measure_all([one]).sums.shape
    model = nn.Sequential(nn.Linear(64, 64)).bfloat16()
    ottava.convert(model, "mxfp8")
    with ottava.debug.observe(model, detail="anatomy") as seen:
        model(torch.randn(32, 64, dtype=torch.bfloat16)).square().sum().backward()
    for row in seen.table():
        assert sum(row[f"error_{name}_pct"] for name in PARTS) == pytest.approx(100), row
