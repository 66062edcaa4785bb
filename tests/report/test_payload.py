"""Numbers survive packing to three digits, and a page of 400 casts stays small."""

import json

import numpy as np
import pytest

from ottava.base.text import number, rounded_alike
from ottava.measure.tally import Tally, tally_fields
from ottava.record.reader import Run, Table
from ottava.record.schema import SlotKey
from ottava.report.page import MAX_BYTES, all_rounded, pack, payload, shown_alike, thinned, unpack


def test_packing_keeps_twelve_bits_and_what_is_not_finite() -> None:
    values = np.array([0.0, -0.0, 1.0, -3.14159, 1e-37, 3.3e38, 448.0, np.inf, -np.inf, np.nan, 123456.7])
    back = unpack(pack(thinned(values)))
    finite = np.isfinite(values)
    assert back[finite] == pytest.approx(values[finite], rel=2.0**-13)
    assert np.array_equal(back[~finite], values[~finite].astype(np.float32), equal_nan=True)


def test_numbers_are_shown_the_same_before_and_after() -> None:
    """Halves of the third digit, what lies beside them, numbers of all sizes; and steps beyond 2**13 are exact."""
    random = np.random.default_rng(0)
    plain = random.normal(size=20_000) * 10.0 ** random.uniform(-30, 30, 20_000)
    halves = (random.integers(100, 1000, 5_000) + 0.5) * 10.0 ** random.integers(-12, 12, 5_000)
    values = np.concatenate([plain, halves, np.nextafter(halves, 0), -halves, [448.0, 0.1, 2.125, np.inf, 0.0]])
    kept = shown_alike(values)
    assert all_rounded(values) == pytest.approx([rounded_alike(float(v)) for v in values], rel=1e-15)
    assert [number(float(v)) for v in kept] == [number(float(v)) for v in values]
    assert kept == pytest.approx(values, rel=2.0**-11)
    steps = random.integers(1, 2**24, 1000).astype(np.float64)
    assert unpack(pack(shown_alike(steps))).tolist() == steps.tolist()


def test_a_good_run_is_packed_beside(small_run: Run) -> None:
    """Its casts are found by layer and tensor, under another recipe too; a cast that it lacks is -1."""
    bad, good = small_run.table(phase=None), small_run.table()
    steps = np.unique(good["step"])
    good = good.take(np.flatnonzero((good["step"] != steps[-1]) & (good["tensor"] != "weight")))
    good = Table({**good.columns, "recipe": np.array(["bf16"] * len(good), dtype=object)}, good.tallies, good.reported)
    made = payload(bad, good)
    facts, numbers = made.facts["good"], unpack(made.packed)
    assert facts["looks"] == len(steps) - 1
    each = facts["rows"] * facts["looks"]
    block = numbers[facts["start"] :][: each * (len(facts["names"]) + 1)]
    values = dict(zip([*facts["names"], "step"], block.reshape(-1, facts["rows"], facts["looks"]), strict=True))
    for slot, place in zip(made.grid.slots, facts["slots"], strict=True):
        assert (place < 0) == (slot.tensor == "weight")
        if place >= 0:
            rows = good.where(layer=slot.layer, tensor=slot.tensor, direction=slot.direction)
            assert values["step"][place].tolist() == rows["step"].tolist()
            assert values["mse"][place] == pytest.approx(rows.metric("mse"), rel=2.0**-11)


def test_facts_say_where_everything_is(small_run: Run) -> None:
    """What the script reads by position is what the grid and the table hold."""
    table = small_run.table()
    made = payload(small_run.table(phase=None))
    facts, grid, numbers = made.facts, made.grid, unpack(made.packed)
    size = len(facts["slots"]) * len(facts["looks"])
    for i, metric in enumerate(facts["metrics"]):
        block = numbers[i * size : (i + 1) * size].reshape(grid.row.shape)
        assert np.allclose(block, grid.values[metric["name"]], rtol=2.0**-11, equal_nan=True)
    steps = numbers[len(facts["metrics"]) * size : (len(facts["metrics"]) + 1) * size]
    assert steps.tolist() == grid.step.ravel().tolist()
    at = len(numbers) - facts["counts"]
    for slot, look, *bins in facts["histograms"]:
        tally = table.tally(int(grid.row[slot, look]))
        for name, first, length in zip(("exponents", "row_sqnr", "block_spread"), bins[::2], bins[1::2], strict=True):
            expected = getattr(tally, name)
            assert numbers[at : at + length] == pytest.approx(expected[first : first + length], rel=2.0**-12)
            assert expected[first : first + length].sum() == expected.sum()
            at += length
    assert at == len(numbers)
    assert "series" not in facts
    json.dumps(facts, allow_nan=False)


def test_every_cast_has_a_histogram_of_its_worst_look(small_run: Run) -> None:
    made = payload(small_run.table())
    have = {(slot, look) for slot, look, *_ in made.facts["histograms"]}
    worst = made.grid.worst()
    assert worst is not None
    assert (worst.slot, worst.look) in have
    assert {slot for slot, _ in have} == set(range(len(made.grid.slots)))


def test_light_rows_make_a_finer_series(small_run: Run) -> None:
    """Looks are columns, amaxes of the steps between go into the series."""
    table = small_run.table()
    light = table.take(np.arange(0, len(table), 2))
    light.columns["phase"][:] = "light"  # type: ignore[index]
    light.columns["step"][:] += 1  # type: ignore[index]
    both = Table(
        {name: np.concatenate([table[name], light[name]]) for name in table.columns},
        Tally(**{f.name: np.concatenate([getattr(t.tallies, f.name) for t in (table, light)]) for f in tally_fields()}),
        [*table.reported, *light.reported],
    )
    made = payload(both)
    assert made.grid.looks == [(step, step) for step in range(2, 25, 2)]
    assert made.facts["series"]["names"][0] == "amax"
    assert made.facts["series"]["looks"] > len(made.grid.looks)


@pytest.mark.slow
def test_400_casts_x_100_looks_of_noise_fit_a_page(small_run: Run) -> None:
    """Noise is the worst case: nothing to compress."""
    casts, looks = 400, 100
    one, rows, random = small_run.table().tally(0), casts * looks, np.random.default_rng(0)
    values = {}
    for f in tally_fields():
        value = getattr(one, f.name)
        noise = np.exp(0.3 * random.normal(size=rows))
        values[f.name] = np.broadcast_to(value, (rows, len(value))) if f.metadata["bins"] else float(value) * noise
    keys = [
        SlotKey(
            f"model.layers.{i // 4}.mlp.w{i % 4}",
            "input",
            "row",
            "delayed",
            "E4M3",
            "tensor",
            "fp32",
            "delayed",
            "door",
        )
        for i in range(casts)
    ]
    columns = {name: np.array([getattr(k, name) for k in keys] * looks, dtype=object) for name in SlotKey._fields}
    columns |= {"step": np.repeat(np.arange(looks), casts), "phase": np.array(["full"] * rows, dtype=object)}
    made = payload(Table(columns, Tally(**values), [{}] * rows))
    assert len(made.packed) <= MAX_BYTES
    assert len(json.dumps(made.facts)) < 250_000
    assert len(made.grid.looks) >= 40
