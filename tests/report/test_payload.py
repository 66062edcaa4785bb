"""Numbers survive packing to three digits, and a page of 300 casts stays small."""

import base64
import json
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ottava.base.text import number, rounded_alike
from ottava.measure.tally import Tally, tally_fields
from ottava.record.reader import Run, Table
from ottava.record.schema import SlotKey
from ottava.report import page
from ottava.report.frame import PagePart, render_sections
from ottava.report.page import MAX_BYTES, all_rounded, coded, pack, payload, render_report
from sweep import sweep

Numbers = np.ndarray[Any, Any]


def decoded(codes: Numbers, digits: int) -> Numbers:
    """The inverse of `coded`, as report.js does it."""
    size = np.abs(codes)
    if digits == 0:
        values = codes.astype(np.float64)
    else:
        first = 10 ** (digits - 1)
        power, scaled = np.divmod(size - 1, 9 * first)
        words = (f"{m}e{e}" for m, e in zip(scaled + first, power + page._LOWEST_POWER - digits + 1, strict=True))
        ordinary = (size > 0) & (size < page._INFINITE)
        values = np.array([float(word) if some else 0.0 for word, some in zip(words, ordinary, strict=True)])
        values = np.copysign(values, codes)
    values = np.where(size == page._INFINITE, np.copysign(np.inf, codes), values)
    return np.where(codes == page._UNKNOWN, np.nan, values)


def unpack(packed: str) -> Numbers:
    """The inverse of `pack`, as report.js does it."""
    planes = np.frombuffer(zlib.decompress(base64.b64decode(packed)), dtype=np.uint8).reshape(4, -1)
    return np.ascontiguousarray(planes.T).view(">i4").astype(np.int64).ravel()


def stored(facts: dict[str, Any], packed: str) -> np.ndarray[Any, Any]:
    """All numbers of a payload."""
    ends = np.cumsum([length for length, _ in facts["kinds"]])
    parts = zip(np.split(unpack(packed), ends[:-1]), facts["kinds"], strict=True)
    return np.concatenate([decoded(codes, digits) for codes, (_, digits) in parts])


def statistic(numbers: np.ndarray[Any, Any], grid: dict[str, Any], name: str, rows: int) -> np.ndarray[Any, Any]:
    """(rows, looks) of a grid of a payload."""
    at, looks = grid["starts"][name], len(grid["firsts"])
    values = numbers[at : at + rows * looks].reshape(rows, looks)
    return np.where(values < 0, -1, values + np.array(grid["firsts"])) if name == "step" else values


@sweep(digits=[2, 3, 5])
def test_codes_keep_their_digits_and_what_is_not_finite(digits: int) -> None:
    """Half a unit of the last digit; the order of codes is that of numbers."""
    random = np.random.default_rng(0)
    values = np.concatenate([random.normal(size=2000) * 10.0 ** random.uniform(-290, 290, 2000), [1e-300, 9.996, 0.0]])
    back = decoded(unpack(pack(coded(values, digits))), digits)
    assert back == pytest.approx(values, rel=0.5001 * 10.0 ** (1 - digits))
    order = np.argsort(values)
    assert (np.diff(coded(values, digits)[order]) >= 0).all()
    special = np.array([np.inf, -np.inf, np.nan])
    assert np.array_equal(decoded(coded(special, digits), digits), special, equal_nan=True)


def test_numbers_are_shown_the_same_before_and_after() -> None:
    """Halves of the third digit, what lies beside them, numbers of all sizes; whole numbers are exact."""
    random = np.random.default_rng(0)
    plain = random.normal(size=20_000) * 10.0 ** random.uniform(-30, 30, 20_000)
    halves = (random.integers(100, 1000, 5_000) + 0.5) * 10.0 ** random.integers(-12, 12, 5_000)
    values = np.concatenate([plain, halves, np.nextafter(halves, 0), -halves, [448.0, 0.1, 2.125, np.inf, 0.0]])
    kept = decoded(unpack(pack(coded(values, 3))), 3)
    assert all_rounded(values) == pytest.approx([rounded_alike(float(v)) for v in values], rel=1e-15)
    assert [number(float(v)) for v in kept] == [number(float(v)) for v in values]
    steps = random.integers(-1, 2**29, 1000).astype(np.float64)
    assert decoded(unpack(pack(coded(steps, 0))), 0).tolist() == steps.tolist()


def test_a_good_run_is_packed_beside(small_run: Run) -> None:
    """Its casts are found by layer and tensor, under another recipe too; a cast that it lacks is -1."""
    bad, good = small_run.table(phase=None), small_run.table()
    steps = np.unique(good["step"])
    good = good.take(np.flatnonzero((good["step"] != steps[-1]) & (good["tensor"] != "weight")))
    good = Table({**good.columns, "recipe": np.array(["bf16"] * len(good), dtype=object)}, good.tallies, good.reported)
    made = payload(bad, good)
    facts, numbers = made.facts["good"], stored(made.facts, made.packed)
    assert len(facts["firsts"]) == len(steps) - 1
    values = {name: statistic(numbers, facts, name, len(good.slots())) for name in facts["starts"]}
    for slot, place in zip(made.grid.slots, facts["slots"], strict=True):
        assert (place < 0) == (slot.tensor == "weight")
        if place >= 0:
            rows = good.where(layer=slot.layer, tensor=slot.tensor, direction=slot.direction)
            assert values["step"][place].tolist() == rows["step"].tolist()
            assert values["mse"][place] == pytest.approx(rows.metric("mse"), rel=0.5e-2)


def test_facts_say_where_everything_is(small_run: Run) -> None:
    """What the script reads by position is what the grid and the table hold."""
    table = small_run.table()
    made = payload(small_run.table(phase=None))
    facts, grid, numbers = made.facts, made.grid, stored(made.facts, made.packed)
    for metric in facts["metrics"]:
        block = statistic(numbers, facts["own"], metric["name"], len(facts["slots"]))
        assert np.allclose(block, grid.values[metric["name"]], rtol=0.5001e-2, equal_nan=True)
    assert statistic(numbers, facts["own"], "step", len(facts["slots"])).tolist() == grid.step.tolist()
    starts = facts["own"]["starts"]
    alike = [name for name in starts if np.array_equal(grid.values.get(name), grid.values["scale_max"], equal_nan=True)]
    assert len({starts[name] for name in alike}) == 1  # equal arrays are stored once
    at = facts["counts"]
    for slot, look, *bins in facts["histograms"]:
        tally = table.tally(int(grid.row[slot, look]))
        for name, first, length in zip(("exponents", "row_sqnr", "block_spread"), bins[::2], bins[1::2], strict=True):
            expected = getattr(tally, name)
            assert numbers[at : at + length] == pytest.approx(expected[first : first + length], rel=0.5001e-2)
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
    assert list(made.facts["series"]["starts"])[:2] == ["step", "amax"]
    assert len(made.facts["series"]["firsts"]) > len(made.grid.looks)


def test_a_page_of_100_layers_and_1000_steps_has_400_kb(small_run: Run) -> None:
    """Noise is the worst case: nothing to compress. Three casts a layer, a look every 10 steps."""
    looks = range(10, 1001, 10)
    names = [f"model.layers.{i // 4}.mlp.w{i % 4}" for i in range(100)]
    cast = ("row", "delayed", "E4M3", "tensor", "fp32", "delayed", "door")
    keys = [SlotKey(name, tensor, *cast) for name in names for tensor in ("input", "weight", "grad_output")]
    one, rows, random = small_run.table().tally(0), len(keys) * len(looks), np.random.default_rng(0)
    values = {}
    for f in tally_fields():
        value = getattr(one, f.name)
        noise = np.exp(0.3 * random.normal(size=rows))
        values[f.name] = np.broadcast_to(value, (rows, len(value))) if f.metadata["bins"] else float(value) * noise
    columns = {name: np.array([getattr(k, name) for k in keys] * len(looks), dtype=object) for name in SlotKey._fields}
    columns |= {"step": np.repeat(looks, len(keys)), "phase": np.array(["full"] * rows, dtype=object)}
    columns |= {"rank": np.zeros(rows, dtype=np.int64), "kind": np.array(["fc1"] * rows, dtype=object)}
    lines = [{"step": step, "loss": 2 + random.normal(), "grad_norm": random.normal() ** 2} for step in range(1, 1001)]
    manifest = {"layers": [{"name": name, "kind": "fc1", "shape": [64, 64]} for name in names]}
    table = Table(columns, Tally(**values), [{}] * rows)
    run = Run.of(Path("run"), manifest, {"steps.jsonl": lines}, table)
    made = payload(table)
    assert len(made.packed) <= MAX_BYTES
    assert (made.digits, len(made.grid.looks) >= 12) == (2, True)
    nothing = {"verdict": "none", "sentence": "No FP8 evidence found.", "findings": []}
    begun = time.process_time()
    html = render_report(run, diagnosis=nothing)
    assert time.process_time() - begun < 12  # 2 to 4 s; a page that a live reader waits for
    assert len(html.encode()) <= 400_000
    six = [render_report(run, diagnosis=nothing, runs=6)] * 6
    parts = [PagePart(one, f"s{i}", "run") for i, one in enumerate(six, 1)]
    assert len(render_sections(parts, six, name="six", notes=[]).encode()) <= 400_000
    assert "a column has several looks" in html
    assert "Most statistics have 2 digits here" in html
