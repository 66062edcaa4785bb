"""Tallies merge exactly, have a zero, and come back from what `measure` packs. Values: tests/measure/test_walk.py."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ottava
from ottava.kernels.native import build as native_build
from ottava.kernels.native import measure as native_measure
from ottava.measure import walk
from ottava.measure.tally import (
    DETAIL_WIDTHS,
    EXTREME_FIELDS,
    EXTREMES,
    SUM_FIELDS,
    SUMMED,
    Tally,
    tally_fields,
    unpack,
)


def filled(seed: int) -> Tally:
    """Every field a different number, histograms too; whole numbers, so that sums are exact in any order."""
    generator = np.random.default_rng(seed)
    values: dict[str, Any] = {}
    for f in tally_fields():
        bins = f.metadata["bins"]
        values[f.name] = generator.integers(1, 1 << 40, bins).astype(float) if bins else float(generator.integers(1e9))
    return Tally(**values)


def test_fields_are_sorted_into_sums_and_extremes() -> None:
    """None is forgotten, none is both; a histogram adds."""
    assert {f.name for f in SUM_FIELDS} | {f.name for f in EXTREME_FIELDS} == {f.name for f in fields(Tally)}
    assert len(SUM_FIELDS) + len(EXTREME_FIELDS) == len(fields(Tally))
    assert {f.name for f in tally_fields("histogram")} <= {f.name for f in SUM_FIELDS}
    assert {*tally_fields("histogram")} | {*tally_fields("number")} == {*tally_fields()}
    assert sum(f.metadata["bins"] or 1 for f in SUM_FIELDS) == DETAIL_WIDTHS["anatomy"]


def test_merging_has_a_zero_and_no_order_and_no_brackets() -> None:
    """Ranks, micro-batches and steps may be merged in any order."""
    a, b, c = filled(1), filled(2), filled(3)
    assert a + Tally() == Tally() + a == a
    assert a + b == b + a
    assert (a + b) + c == a + (b + c)
    assert a + b != a


@pytest.mark.parametrize("f", [*tally_fields()], ids=lambda f: f.name)
def test_every_field_merges_by_its_rule(f: Any) -> None:
    """Sums add, extremes take the larger or the smaller."""
    a, b = filled(1), filled(2)
    rule = {"sum": np.add, "max": np.maximum, "min": np.minimum}[f.metadata["merge"]]
    assert np.array_equal(getattr(a + b, f.name), rule(getattr(a, f.name), getattr(b, f.name)))


def test_tables_merge_row_by_row() -> None:
    """Every field may be an array of rows."""
    a = Tally(n=np.array([1.0, 2.0]), amax=np.array([5.0, 0.0]), exponents=np.ones((2, 1024)))
    b = Tally(n=np.array([10.0, 20.0]), amax=np.array([1.0, 3.0]), exponents=np.ones((2, 1024)))
    both = a + b
    assert both.n.tolist() == [11, 22]
    assert both.amax.tolist() == [5, 3]
    assert both.exponents.shape == (2, 1024)
    assert both.exponents.sum() == 4096


def test_unpacking_reverses_packing() -> None:
    """One tally, and several at once."""
    tally = filled(4)
    sums = np.concatenate([np.ravel(getattr(tally, f.name)) for f in SUM_FIELDS])
    signs = np.array([-1.0 if f.metadata["merge"] == "min" else 1.0 for f in EXTREME_FIELDS])
    extremes = signs * np.array([getattr(tally, f.name) for f in EXTREME_FIELDS])
    assert unpack(sums, extremes) == tally
    both = unpack(np.stack([sums, 2 * sums]), np.stack([extremes, extremes]))
    assert both.n.tolist() == [tally.n, 2 * tally.n]
    assert both.exponents[1].tolist() == (2 * tally.exponents).tolist()
    assert both.amin.tolist() == [tally.amin] * 2


def test_tallies_do_not_share_their_histograms() -> None:
    """A default is made for each."""
    Tally().exponents[0] = 5
    assert Tally().exponents[0] == 0


# --- another sum -----------------------------------------------------------------------------------------------------

LACKS = "{}: the field 'sx3' is a number in measure/tally.py, but missing in the kernel; make them agree"
NATIVE = pytest.mark.skipif(bool(native_build.load("measure").reason), reason=native_build.load("measure").reason)
LINES = (
    ("measure/tally.py", "    sx4: Number", "    sx3: Number = field(default=0.0, metadata=_SUM)\n    sx4: Number"),
    ("measure/walk.py", '"sx4": 4,', '"sx3": 3, "sx4": 4,'),
    ("measure/walk.py", '            "sx4": (', '            "sx3": (squares * y).sum(1),\n            "sx4": ('),
    ("kernels/native/src/numbers.h", " X(row_sqnr", " X(sx3, 0) X(row_sqnr"),
    (
        "kernels/native/src/measure.h",
        "        if (histograms) this->row",
        "        for (int64_t i = 0; i < job.cols; i++) out[places[sum::sx3]] += __builtin_pow(T::value(here[i]), 3);\n"
        "        if (histograms) this->row",
    ),
)
SCRIPT = """
import ottava, torch
from ottava.measure import walk as measure
from ottava.kernels.native import measure as native_measure
x = torch.linspace(-1, 3, 130 * 40).reshape(130, 40)
x_q = ottava.quantize(x, ottava.QuantizationSpec(ottava.E4M3))
print(measure.measure(x, x_q).sx3)
native_measure.supports_measure = lambda *_: "not now"
print(measure.measure(x, x_q).sx3)
"""


@NATIVE
def test_a_sum_that_a_kernel_forgets_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a zero: each says by name that it lacks a third moment, and that it has one of other bins."""
    x = torch.ones(2, 2)
    look = native_measure.Look(x, ottava.quantize(x, ottava.QuantizationSpec(ottava.E4M3)), walk.survey(x))
    sums, extremes = SUMMED["blocks"], tuple(EXTREMES.items())
    with pytest.raises(ValueError, match=LACKS.format("native_measure")):
        native_measure.measure([look], native_measure.Layout((("sx3", 0), *sums.items()), extremes, 9, 99), 0)
    with pytest.raises(ValueError, match=r"'sx3' is a number in measure/tally\.py, but missing"):
        native_measure.measure([look], native_measure.Layout(tuple(sums.items()), (*extremes, ("sx3", 0)), 9, 99), 0)
    with pytest.raises(ValueError, match="native_measure: extremes are amax, amin"):
        native_measure.measure([look], native_measure.Layout(tuple(sums.items()), extremes[::-1], 9, 99), 0)
    with pytest.raises(ValueError, match=r"'exponents' is of 8 bins in .*, but of 1024 bins in"):
        native_measure.measure([look], native_measure.Layout((*(sums | {"exponents": 8}).items(),), extremes, 9, 99), 0)
    monkeypatch.setattr(native_measure, "supports_measure", lambda *_: "not now")
    monkeypatch.setattr(walk, "SUMMED", {"blocks": sums | {"sx3": 0}})
    with pytest.raises(ValueError, match=LACKS.format("measure")):
        walk.measure_all([look])


@NATIVE
def test_a_sum_is_a_field_and_a_line_a_kernel(tmp_path: Path) -> None:
    """A third moment, added as a contributor does in a copy of the package: that of fp64 from C++ and from torch."""
    shutil.copytree(Path(ottava.__file__).parent, tmp_path / "ottava", ignore=shutil.ignore_patterns("__pycache__"))
    for name, old, new in LINES:
        file = tmp_path / "ottava" / name
        source = file.read_text()
        assert source.count(old) == 1, (name, old)
        file.write_text(source.replace(old, new))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    said = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment, timeout=800)
    assert not said.returncode, said.stderr
    native, walked = said.stdout.splitlines()
    truth = float(torch.linspace(-1, 3, 130 * 40).double().pow(3).sum())
    assert float(native) == pytest.approx(truth, rel=1e-6)
    assert float(walked) == pytest.approx(truth, rel=1e-6)
