"""Makes the report of a run: one HTML file that needs no other file and opens anywhere.

The template (report.html.j2) has the words, report.js draws the pictures. Every picture has a table with the same
numbers, which also works without JavaScript.

`payload` packs the data of the script: a little JSON, and all numbers as deflated 32-bit floats in base64. Numbers keep
12 bits of mantissa, more than three digits, and `text.number` shows the same three digits of them; whole numbers, such
as steps and counts of infinities, are exact. The four bytes go into four planes, which deflate packs to about a third.
If that is still too much for one page, neighbouring looks share a column (`grid`).
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import numpy as np
import numpy.typing as npt

from ottava.base import text
from ottava.base.files import replacing
from ottava.base.text import rounded_alike
from ottava.diagnose.compare import compare
from ottava.diagnose.diagnose import diagnose
from ottava.diagnose.what_if import Prediction, predict
from ottava.diagnose.what_if import thinned as thinned_rows
from ottava.measure.layer_names import symbol
from ottava.measure.statistics import STATISTICS
from ottava.numerics.formats import FORMATS
from ottava.record.amaxes import recorded
from ottava.record.reader import Run, Table
from ottava.report import sections
from ottava.report.frame import render, script_json
from ottava.report.grid import SCALES, Grid, Values

_MOST_POINTS = 800
_TABLE_STEPS = 120
_MOST_PREDICTED_ROWS = 3000


@dataclass(frozen=True)
class Report:
    """A page and its diagnosis."""

    html: str
    """The whole file."""
    diagnosis: Mapping[str, Any]
    """`Diagnosis.to_dict()`."""

    def write(self, path: Path) -> Path:
        """Writes the file under another name and renames it, so that no reader sees half of it."""
        with replacing(path) as scratch:
            scratch.write_text(self.html, encoding="utf-8")
        return path


def make_report(run: Run, *, baseline: Run | None = None) -> Report:
    """Analyses a watched run and makes its page.

    Args:
        baseline: a good run to compare with.

    Example:
        >>> import tempfile
        >>> from ottava.record.writer import RunWriter
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with RunWriter(folder) as writer:
        ...         writer.step(1, loss=2.5)
        ...     make_report(Run.open(folder)).html[:15]
        '<!doctype html>'
    """
    diagnosis = diagnose(run, baseline=baseline).to_dict()
    comparison = compare(baseline, run).to_dict() if baseline is not None else None
    predictions, asked = _predictions(run)
    html = render_report(
        run, diagnosis=diagnosis, predictions=predictions, asked=asked, baseline=baseline, comparison=comparison
    )
    return Report(html, diagnosis)


def _predictions(run: Run) -> tuple[list[Prediction], tuple[int, int]]:
    """What-if for a run, and (casts used, casts recorded): a long run uses only some looks."""
    everything, table = run.table(phase=None), run.table()
    asked = table
    if len(table) > _MOST_PREDICTED_ROWS:
        asked = thinned_rows(table, max(4, _MOST_PREDICTED_ROWS // len(table.slots())))
    return predict(asked, recording=recorded(run.path), amaxes=everything), (len(asked), len(table))


def render_report(
    run: Run,
    *,
    diagnosis: Mapping[str, Any],
    predictions: Sequence[Prediction] = (),
    asked: tuple[int, int] | None = None,
    baseline: Run | None = None,
    comparison: Mapping[str, Any] | None = None,
) -> str:
    """Renders the page from a run and the results of the analysis functions.

    Args:
        diagnosis, comparison: as dicts.
        asked: (casts used for the predictions, casts recorded); None: all.
    """
    numbers = payload(run.table(phase=None), None if baseline is None else baseline.table())
    grid = numbers.grid
    worst = grid.worst_of_looks()
    events = sections.marks(run.events)
    experiment = sections.experiment(run.experiments, (slot.format for slot in grid.slots))
    facts = numbers.facts | {
        "loss": _curves(run),
        "baseline": _curves(baseline) if baseline is not None else None,
        "events": events,
        "worst": [
            None if w is None else [w.slot, w.metric, w.value, w.level, share]
            for w, share in zip(worst, grid.alarming(), strict=True)
        ],
        "experiment": experiment,
    }
    entries = diagnosis.get("findings") or []
    findings = [{"number": i, **sections.finding(entry, grid)} for i, entry in enumerate(entries)]
    first = 100 * bool(findings)  # without findings the page opens the first note
    notes = [{"number": i, **sections.finding(one, grid)} for i, one in enumerate(diagnosis.get("notes") or [], first)]
    facts["start"] = _start(grid, findings)
    return render(
        __package__,
        "report.html.j2",
        name=run.path.resolve().name,
        started=str(run.manifest.get("started") or ""),
        facts=script_json(facts),
        packed=numbers.packed,
        diagnosis=diagnosis,
        headline=sections.headline(diagnosis),
        rest=sections.rest(diagnosis),
        experiment=experiment,
        findings=findings,
        notes=notes,
        questions=sections.questions(diagnosis),
        untested=sections.untested(diagnosis),
        grid=grid,
        statistics=STATISTICS,
        steps_text=text.steps_text,
        loss_rows=_loss_rows(run, grid, worst),
        has_loss=bool(facts["loss"]["loss"][0]),
        has_norm=bool(facts["loss"]["grad_norm"][0]),
        worst_runs=sections.worst_runs(grid, worst),
        events=events,
        worst_table=sections.worst_table(grid),
        what_if=sections.what_if(predictions),
        not_recorded=run.table().not_recorded(),
        asked=asked if asked is not None and asked[0] < asked[1] else None,
        difference=sections.difference(comparison) if comparison is not None else None,
        baseline=None if baseline is None else baseline.path.resolve().name,
        coverage=sections.coverage(run.manifest, grid),
        layers=sections.layer_rows(run.manifest),
        command=sections.command(run.manifest),
        facts_of_run=sections.facts_of_run(run.manifest),
        settings=sections.settings_of_run(run.manifest),
        ranks=len(run.ranks),
    )


def _curves(run: Run) -> dict[str, Any]:
    """Loss and gradient norm, thinned; [[], []] if the run did not log them."""
    steps = run.steps
    curves: dict[str, Any] = {}
    for name in ("loss", "grad_norm"):
        values = steps.get(name, np.zeros(0))
        curves[name] = sections.thin(steps["step"], values, _MOST_POINTS) if np.isfinite(values).any() else [[], []]
    curves["not_finite_from"] = sections.not_finite_from(steps["step"], steps["loss"]) if len(steps["step"]) else None
    return curves


def _start(grid: Grid, findings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The selection when the page opens: the first evidence of the first finding; without one the worst cell."""
    links = [item["link"] for finding in findings[:1] for item in finding["evidence"] if "metric=" in item["link"]]
    if links:
        asked = parse_qs(links[0][1:])
        step = int(asked.get("step", ["0"])[0])
        look = max((i for i, (first, _) in enumerate(grid.looks) if first <= step), default=0)
        return {"slot": int(asked["slot"][0]), "look": look, "metric": asked["metric"][0]}
    worst = grid.worst()
    if worst is not None and worst.level > 0:
        return {"slot": worst.slot, "look": worst.look, "metric": worst.metric}
    metric = next((name for name in (*sections.WORST_COLUMNS, *grid.values) if name in grid.values), None)
    return {"slot": 0, "look": max(0, len(grid.looks) - 1), "metric": metric}


def _loss_rows(run: Run, grid: Grid, worst: Sequence[Any]) -> list[dict[str, Any]]:
    """The picture of loss and worst tensors as a table: one row per look; without looks, one row per step."""
    steps, loss, norm = run.steps["step"], run.steps["loss"], run.steps.get("grad_norm")
    at = {int(step): i for i, step in enumerate(steps)}
    tensors = {}
    for look, cell in enumerate(worst):
        if cell is not None:
            tensors[int(grid.step[cell.slot, look])] = cell
    shown = sorted({*tensors, *(at if not tensors else ())})
    every = -(-len(shown) // _TABLE_STEPS) or 1
    rows = []
    for step in [step for i, step in enumerate(shown) if i % every == 0 or i == len(shown) - 1]:
        i, cell = at.get(step), tensors.get(step)
        row = {"step": step, "loss": text.number(float(loss[i])) if i is not None else text.number(None)}
        row["grad_norm"] = text.number(float(norm[i])) if i is not None and norm is not None else text.number(None)
        row |= {"layer": "", "tensor": "", "metric": "", "value": ""}
        if cell is not None:
            slot = grid.slots[cell.slot]
            value = text.number(cell.value, STATISTICS[cell.metric].unit)
            row |= {"layer": slot.layer, "tensor": symbol(slot.tensor), "metric": cell.metric, "value": value}
        rows.append(row)
    return rows


MAX_BYTES = 1_450_000
"""Largest size of the base64 text, so that a whole page stays under 2 MB."""
_MOST_LOOKS, _LEAST_LOOKS = 240, 3
_MAX_HISTOGRAMS = 1200
_SERIES = ("amax", "scale_min", "scale_max", "nonfinite")
_HISTOGRAMS = ("exponents", "row_sqnr", "block_spread")
_DROPPED_BITS = 11
_NEAR_A_HALF = 1e-6  # of the third digit: far more than the error of the vectorized division below
_LEAST_NORMAL = 2.0**-126
_WHOLE = 2**24
"""fp32 represents every whole number up to this."""


@dataclass(frozen=True, eq=False)
class Payload:
    """The numbers of a page."""

    facts: dict[str, Any]
    """Plain JSON: the meaning of the arrays in `packed`."""
    packed: str
    """base64 of deflated byte planes."""
    grid: Grid


def payload(table: Table, good: Table | None = None) -> Payload:
    """The payload of all rows of a run, with light rows (`Run.table(phase=None)`).

    Args:
        good: the full rows of a run to compare with; the page draws its curves beside those of the run.
    """
    full = table.where(phase="full")
    light = len(full) < len(table)
    main = full if len(full) else table
    most = _MOST_LOOKS
    while True:
        grid = Grid.of(main, most)
        series = Grid.of(table, 2 * most, _SERIES, by="amax") if light and len(full) else None
        beside = Grid.of(good, most) if good is not None and len(good) else None
        facts, packed = _pack(main, grid, series, beside)
        if len(packed) <= MAX_BYTES or most <= _LEAST_LOOKS:
            break
        most = max(_LEAST_LOOKS, int(0.97 * MAX_BYTES / len(packed) * len(grid.looks)))
    return Payload(facts, packed, grid)


def _pack(table: Table, grid: Grid, series: Grid | None, good: Grid | None) -> tuple[dict[str, Any], str]:
    names = [name for name in STATISTICS if name in grid.values]
    arrays = [grid.values[name].ravel() for name in names] + [grid.step.ravel().astype(np.float64)]
    histograms, counts = _histograms(table, grid)
    facts: dict[str, Any] = {
        "slots": [{**slot._asdict(), "symbol": symbol(slot.tensor)} for slot in grid.slots],
        "groups": grid.groups(),
        "looks": grid.looks,
        "metrics": [_metric(name, grid.values[name]) for name in names],
        "floor": [None if np.isnan(v) else round(float(v), 2) for v in grid.floor],
        "formats": _formats(),
        "histograms": histograms,
        "counts": len(counts),
    }
    for name, other, wanted in (("series", series, list(_SERIES)), ("good", good, names)):
        if other is not None:
            facts[name], more = _other(grid, other, wanted)
            facts[name]["start"] = sum(len(array) for array in arrays)
            arrays += more
    return facts, pack(np.concatenate([shown_alike(np.concatenate(arrays)), thinned(counts)]))


def _other(grid: Grid, other: Grid, names: Sequence[str]) -> tuple[dict[str, Any], list[Values]]:
    """Another grid with looks of its own: its facts, and its arrays, the last one of steps.

    `slots` holds for each cast of the page its row there: the same cast, or else one of the same tensor by another
    recipe; -1 for none.
    """
    places = {slot[:3]: i for i, slot in reversed(list(enumerate(other.slots)))}
    exact = {slot: i for i, slot in enumerate(other.slots)}
    slots = [exact.get(slot, places.get(slot[:3], -1)) for slot in grid.slots]
    present = [name for name in names if name in other.values]
    arrays = [other.values[name].ravel() for name in present] + [other.step.ravel().astype(np.float64)]
    return {"slots": slots, "rows": len(other.slots), "looks": len(other.looks), "names": present}, arrays


def thinned(values: Values) -> npt.NDArray[np.float32]:
    """Floats with 12 bits of mantissa.

    Example:
        >>> thinned(np.array([1.0, 1000.1, np.inf])).tolist()
        [1.0, 1000.125, inf]
    """
    with np.errstate(over="ignore"):
        bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    special = (bits & 0x7F800000) == 0x7F800000
    rounded = (bits + np.uint32(1 << (_DROPPED_BITS - 1))) & np.uint32(0xFFFFFFFF << _DROPPED_BITS & 0xFFFFFFFF)
    return np.where(special, bits, rounded).view(np.float32)


def shown_alike(values: Values) -> npt.NDArray[np.float32]:
    """`thinned` to the neighbour that shows the same three digits; whole numbers stay exact.

    Example:
        >>> values = np.array([1.28503, 12345.0])
        >>> shown_alike(values).tolist(), thinned(values).tolist()
        ([1.28515625, 12345.0], [1.284912109375, 12346.0])
    """
    near, shown = thinned(values), all_rounded(values)
    digits = all_rounded(near.astype(np.float64))
    with np.errstate(invalid="ignore"):  # infinity less infinity
        other = (np.abs(digits - shown) > 1e-6 * np.abs(shown)) & (np.abs(values) >= _LEAST_NORMAL)
    # 12 bits are finer than three digits, so the next number is on the right side
    step = np.where(np.abs(digits) < np.abs(shown), 1, -1).astype(np.int64) << _DROPPED_BITS
    next_to = (near.view(np.uint32) + step).astype(np.uint32).view(np.float32)
    whole = (np.abs(values) <= _WHOLE) & (values == np.floor(values))
    return np.where(whole, values.astype(np.float32), np.where(other, next_to, near))


def all_rounded(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """`rounded_alike` of every finite number, except for its last bits; other numbers stay.

    Example:
        >>> all_rounded(np.array([2.125, 99960.0, np.inf])).tolist()
        [2.13, 100000.0, inf]
    """
    finite = np.isfinite(values) & (values != 0)
    size = np.abs(np.where(finite, values, 1.0))
    unit = 10.0 ** (np.floor(np.log10(size)) - 2)
    digits = size / unit
    rounded = np.where(finite, np.copysign(np.floor(digits + 0.5) * unit, values), values)
    for i in np.flatnonzero(finite & (np.abs(digits - np.floor(digits) - 0.5) < _NEAR_A_HALF)):
        rounded.flat[i] = rounded_alike(float(values.flat[i]))
    return rounded


def pack(values: npt.NDArray[np.float32]) -> str:
    """Floats as base64 of deflated byte planes, the highest byte first.

    Example:
        >>> unpack(pack(np.array([1.0, -2.5, 448.0, np.inf], dtype=np.float32))).tolist()
        [1.0, -2.5, 448.0, inf]
    """
    planes = np.ascontiguousarray(values).astype(">f4").view(np.uint8).reshape(-1, 4).T
    return base64.b64encode(zlib.compress(np.ascontiguousarray(planes).tobytes(), 9)).decode("ascii")


def unpack(packed: str) -> npt.NDArray[np.float32]:
    """The inverse of `pack`, as report.js does it."""
    planes = np.frombuffer(zlib.decompress(base64.b64decode(packed)), dtype=np.uint8).reshape(4, -1)
    return np.ascontiguousarray(planes.T).view(">u4").astype(np.uint32).view(np.float32).ravel()


def _metric(name: str, values: Values) -> dict[str, Any]:
    """The facts that the script needs to show and colour a statistic."""
    statistic, scale = STATISTICS[name], SCALES.get(name)
    entry: dict[str, Any] = {"name": name, "unit": statistic.unit, "meaning": statistic.meaning}
    if scale is not None:
        ends = {"calm": scale.calm, "alarm": scale.alarm, "log": scale.log, "below": scale.below_format}
        return entry | {"warns": True, **ends}
    values = values[np.isfinite(values)]
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
    log = low > 0 and high > 30 * low
    return entry | {"warns": False, "calm": low, "alarm": high, "log": log, "below": False}


def _formats() -> dict[str, dict[str, float]]:
    """The formats that the tensor page offers: signed formats of up to 8 bits."""
    names = {"max": "max", "clip": "clip", "normal": "min_normal", "subnormal": "min_subnormal", "eps": "eps"}
    formats = {name: fmt for name, fmt in FORMATS.items() if fmt.signed and fmt.has_zero and fmt.bits <= 8}
    return {name: {key: getattr(fmt, field) for key, field in names.items()} for name, fmt in formats.items()}


def _histograms(table: Table, grid: Grid) -> tuple[list[list[int]], Values]:
    """The histograms of some looks for each cast: the worst, the first, the last, and as many between as fit.

    Returns:
        [slot, look, then first bin and bins of each histogram], and the counts of all histograms in a row.
    """
    each = max(3, _MAX_HISTOGRAMS // max(1, len(grid.slots)))
    alarm = np.nan_to_num(grid.alarm()[0], nan=-1e9, posinf=1e9, neginf=-1e8)
    filled_rows = table.has_histograms() | table.has_histograms("row_sqnr")
    chosen: list[tuple[int, int]] = []
    for slot in range(len(grid.slots)):
        looks = [k for k in np.flatnonzero(grid.row[slot] >= 0).tolist() if filled_rows[grid.row[slot, k]]]
        if looks:
            worst = looks[int(np.argmax(alarm[slot, looks]))]
            chosen += [(slot, look) for look in sorted({worst, *_spread(looks, each)})]
    tallies = table.take([grid.row[slot, look] for slot, look in chosen]).tallies  # all tallies would fill the memory
    entries = [[slot, look] for slot, look in chosen]
    counts: list[Values] = [np.zeros(0)]
    for i, entry in enumerate(entries):
        for name in _HISTOGRAMS:
            bins = np.asarray(getattr(tallies, name)[i])
            filled = np.flatnonzero(bins)
            first, last = (int(filled[0]), int(filled[-1]) + 1) if len(filled) else (0, 0)
            entry += [first, last - first]
            counts.append(bins[first:last])
    return entries, np.concatenate(counts)


def _spread(items: Sequence[int], most: int) -> list[int]:
    """Up to `most` items, evenly spread, with the first and the last."""
    if len(items) <= most:
        return list(items)
    return [items[i] for i in np.linspace(0, len(items) - 1, most).round().astype(int)]
