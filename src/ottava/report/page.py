"""Makes the report of a run: one HTML file that needs no other file and opens anywhere.

The template (report.html.j2) has the words, report.js draws the pictures. Every picture has a table with the same
numbers, which also works without JavaScript.

`payload` packs the data of the script: JSON, and all numbers as decimal codes of the three digits that `text.number`
shows; whole numbers, such as steps and counts of infinities, are exact. An array that equals another is stored once.
The four bytes of a code go into four planes, and all is deflated base64. If that is too much for one page,
neighbouring looks share a column, which shows the worst of them (`grid`), and statistics have two digits.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import parse_qs

import numpy as np
import numpy.typing as npt

from ottava.base import text
from ottava.base.text import progress, rounded_alike
from ottava.base.untrusted import MAX_BYTES as MAX_TEXT
from ottava.base.untrusted import UntrustedError, parse_json, read_text
from ottava.diagnose.compare import compare
from ottava.diagnose.diagnose import diagnose
from ottava.diagnose.what_if import Prediction, predict
from ottava.diagnose.what_if import thinned as thinned_rows
from ottava.measure.layer_names import symbol
from ottava.measure.statistics import STATISTICS
from ottava.numerics.formats import FORMATS
from ottava.record.amaxes import recorded
from ottava.record.reader import Run, Table
from ottava.record.schema import MANIFEST, TRAINER_MANIFEST, RunError
from ottava.report import sections
from ottava.report.frame import PagePart, deflated, render, render_sections, script_json, write_page
from ottava.report.grid import SCALES, Grid, Values

MAX_BYTES = 245_000
"""Largest size of the base64 text of all numbers, so that a page of 100 layers and 1,000 steps stays under 400 kB."""
MOST_POINTS = 800
_WRITER = re.compile(r'<meta name="generator" content="(ottava (?!report|explorer)[a-z]+)">')
_WRITTEN_BY = re.compile(r'"written_by": ?"(ottava [a-z-]+)"')
_SEVERITIES = ("critical", "warning", "none")
_MOST_RUNS, _MOST_PAGES, _MOST_FILES = 6, 40, 500
CURVES = ("loss", "grad_norm")
Curve = list[list[Any]]
"""Steps and values, as `sections.thin` gives them."""
_TABLE_STEPS = 60
_A_RUN = 25_000
"""Bytes of what a run has on a page of several beside its numbers: sentences and tables."""
_MOST_PREDICTED_ROWS = 3000


@dataclass(frozen=True)
class Report:
    """A page and its diagnosis."""

    html: str
    """The whole file."""
    diagnosis: Mapping[str, Any]
    """`Diagnosis.to_dict()`."""

    def write(self, path: Path, language: str = "en") -> Path:
        """Writes the file under another name and renames it, so that no reader sees half of it."""
        return write_page(path, self.html, language)


def make_report(
    run: Run,
    *,
    baseline: Run | None = None,
    live: bool = False,
    earlier: Mapping[str, Curve] | None = None,
    runs: int = 1,
) -> Report:
    """Analyses a watched run and makes its page.

    Args:
        baseline: a good run to compare with.
        runs: how many runs share the page; of several, each has fewer numbers and shorter tables.
        live: the page follows the run, see `report.live`, and predicts other recipes when the run has ended.
        earlier: curves of loss and grad_norm before the steps of the run that are at hand.

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
    if going := live and not run.manifest.get("ended"):
        diagnosis["sentence"] = diagnosis["sentence"].partition(" The record stops after step ")[0]
    predictions, asked = ([], None) if going else _predictions(run)
    more: dict[str, Any] = {"baseline": baseline, "comparison": comparison, "live": live, "earlier": earlier}
    return Report(
        render_report(run, diagnosis=diagnosis, predictions=predictions, asked=asked, runs=runs, **more), diagnosis
    )


def make_results(folder: Path, *, baseline: Run | None = None) -> Report:
    """One page of every result in a folder: its watched runs, the worst first, and what other commands wrote.

    That is a page, or JSON with `written_by` and `sentence` where no page of the same name lies beside it. Three
    levels of folders are searched. A good run among them is compared with the runs beside it. If a folder is a
    run and holds nothing else, the page is that of the run.

    Raises:
        RunError: nothing is there, or `folder` is a run that cannot be read.
    """
    paths = [folder] * is_run(folder)
    paths += [path.parent for path in _newest(folder, MANIFEST) if path.parent != folder]
    pages, notes = list[tuple[Path, str, str]](), list[str]()
    for path in [*_newest(folder, "*.html"), *_newest(folder, "*.json")]:
        try:
            pages += [(path, *found)] if (found := _page(path)) else []
        except (OSError, UntrustedError) as error:
            notes.append(str(error))
    if not pages and len(paths) < 2 and paths in ([], [folder]):
        return make_report(Run.open(folder), baseline=baseline)
    reports = dict[Path, Report]()
    for path in progress(paths[:_MOST_RUNS], "reading the runs"):
        try:
            good = baseline if baseline is not None and _compared(path, baseline.path, folder) else None
            reports[path] = make_report(Run.open(path), baseline=good, runs=min(len(paths), _MOST_RUNS))
        except RunError as error:
            if path == folder:
                raise
            notes.append(str(error))
    worst = {path: _SEVERITIES.index(str(one.diagnosis["verdict"])) for path, one in reports.items()}
    order = sorted(reports, key=lambda path: (baseline is not None and path.samefile(baseline.path), worst[path]))
    made = [(f"ottava report: {path.resolve().name}", reports[path].html) for path in order]
    made += [(f"{writer}: {path.relative_to(folder)}", page) for path, writer, page in pages[:_MOST_PAGES]]
    notes += [f"This page holds {_MOST_RUNS} runs; {path} is not among them." for path in paths[_MOST_RUNS:]]
    notes += [f"This page holds {_MOST_PAGES} pages; {path} is not among them." for path, *_ in pages[_MOST_PAGES:]]
    if not made:
        raise RunError(f"{folder}: no result in it can be read. {' '.join(notes)}")
    sections = [PagePart(html, f"s{i}", title) for i, (title, html) in enumerate(made, 1)]
    runs = [html for _, html in made[: len(order)]]
    html = render_sections(sections, runs, name=folder.resolve().name, notes=notes)
    first = {"verdict": "none", "sentence": f"{sections[0].headline}."}
    return Report(html, reports[order[0]].diagnosis if order else first)


def _compared(run: Path, good: Path, folder: Path) -> bool:
    """Whether a run is compared with the good one: where that lies in the folder, too, only runs beside it."""
    run, good, folder = run.resolve(), good.resolve(), folder.resolve()
    return run != good and (folder not in good.parents or run == folder or run.parent == good.parent)


def is_run(folder: Path) -> bool:
    """Whether a folder is a run of `ottava watch` or `ottava train`."""
    return (folder / MANIFEST).is_file() or (folder / TRAINER_MANIFEST).is_file()


def _page(path: Path) -> tuple[str, str] | None:
    """Command and page of a file that it wrote: a page, or JSON, of which a page is made; None: another file."""
    page = path.suffix == ".html"
    if not page and (path.stat().st_size > MAX_TEXT or path.with_suffix(".html").exists()):
        return None
    with path.open("rb") as file:
        writer = (_WRITER if page else _WRITTEN_BY).search(file.read(1000 if page else -1).decode("utf-8", "replace"))
    if writer is None or page:
        return writer and (writer[1], read_text(path))
    values = parse_json(read_text(path))
    if not isinstance(values, dict) or not isinstance(values.get("sentence"), str):
        return None
    return writer[1], render(__package__, "values.html.j2", values=values)


def _newest(folder: Path, pattern: str) -> list[Path]:
    """The files of a pattern in a folder and three levels below it, the newest first."""
    found = (path for depth in range(4) for path in islice(folder.glob("*/" * depth + pattern), _MOST_FILES))
    return sorted(filter(Path.is_file, found), key=lambda path: -path.stat().st_mtime)


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
    live: bool = False,
    earlier: Mapping[str, Curve] | None = None,
    runs: int = 1,
) -> str:
    """Renders the page from a run and the results of the analysis functions.

    Args:
        diagnosis, comparison: as dicts.
        live, earlier, runs: as in `make_report`.
        asked: (casts used for the predictions, casts recorded); None: all.
    """
    room = MAX_BYTES // runs - _A_RUN * (runs > 1)
    numbers = payload(run.table(phase=None), None if baseline is None else baseline.table(), room)
    grid, events = numbers.grid, sections.marks(run.events)
    worst = grid.worst_of_looks()
    experiment = sections.experiment(run.experiments, (slot.format for slot in grid.slots))
    facts = numbers.facts | {
        "loss": _curves(run, earlier or {}),
        "baseline": baseline and _curves(baseline) | {"experiment": sections.experiment(baseline.experiments, ())},
        "events": events,
        "worst": [
            None if w is None else [w.slot, w.metric, w.value, w.level, share]
            for w, share in zip(worst, grid.alarming(), strict=True)
        ],
        "experiment": experiment,
    }
    findings = _numbered(diagnosis.get("findings"), grid, 0)
    notes = _numbered(diagnosis.get("notes"), grid, 100 * bool(findings))  # without findings the first note opens
    facts["start"] = _start(grid, findings)
    rows, every = _loss_rows(run, grid, worst, runs)
    return render(
        __package__,
        "report.html.j2",
        name=run.path.resolve().name,
        started=str(run.manifest.get("started") or ""),
        facts=deflated(script_json(facts).encode()),
        packed=numbers.packed,
        digits=numbers.digits,
        live=live,
        diagnosis=diagnosis,
        headline=sections.headline(diagnosis),
        rest=sections.rest(diagnosis),
        experiment=experiment,
        decisive=sections.decisive(run.experiments, experiment, diagnosis),
        tried=sections.tried(diagnosis),
        findings=findings,
        notes=notes,
        questions=sections.questions(diagnosis),
        untested=sections.untested(diagnosis),
        grid=grid,
        statistics=STATISTICS,
        steps_text=text.steps_text,
        loss_rows=rows,
        every=every,
        runs=runs,
        has_loss=bool(facts["loss"]["loss"][0]),
        has_norm=bool(facts["loss"]["grad_norm"][0]),
        worst_runs=sections.worst_runs(grid, worst),
        events=events,
        worst_table=sections.worst_table(grid, runs),
        what_if=sections.what_if(predictions, runs),
        not_recorded=run.not_recorded(),
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


def _numbered(found: Sequence[Any] | None, grid: Any, first: int) -> list[dict[str, Any]]:
    return [{"number": i, **sections.finding(one, grid)} for i, one in enumerate(found or [], first)]


def _curves(run: Run, earlier: Mapping[str, Curve] = MappingProxyType({})) -> dict[str, Any]:
    """Loss and gradient norm, thinned; [[], []] if the run did not log them."""
    steps = run.steps
    curves: dict[str, Any] = {}
    for name in CURVES:
        values = steps.get(name, np.zeros(0))
        shown = sections.thin(steps["step"], values, MOST_POINTS) if np.isfinite(values).any() else [[], []]
        before = earlier.get(name, [[], []])
        digits = [None if v is None else float(f"{v:.6g}") for v in shown[1]]  # finer than a pixel
        curves[name] = [before[0] + shown[0], before[1] + digits]
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


def _loss_rows(run: Run, grid: Grid, worst: Sequence[Any], runs: int) -> tuple[list[dict[str, Any]], int]:
    """The picture of loss and worst tensors as a table, a row per look or per step, and n: one row in n is there."""
    steps, loss, norm = run.steps["step"], run.steps["loss"], run.steps.get("grad_norm")
    at = {int(step): i for i, step in enumerate(steps)}
    tensors = {}
    for look, cell in enumerate(worst):
        if cell is not None:
            tensors[int(grid.step[cell.slot, look])] = cell
    shown = sorted({*tensors, *(at if not tensors else ())})
    every = -(-len(shown) // (_TABLE_STEPS // runs)) or 1
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
    return rows, every


_MOST_LOOKS, _ENOUGH_LOOKS, _LEAST_LOOKS = 240, 48, 3
_MAX_HISTOGRAMS = 240
_DIGITS = 3
_FINE = MappingProxyType({"cosine": 5, "gain": 5})
"""Statistics close to 1, whose differences lie in later digits."""
_SERIES = ("amax", "scale_min", "scale_max", "nonfinite")
_NEAR_A_HALF = 1e-6  # of the third digit: far more than the error of the vectorized division below
_INFINITE, _UNKNOWN = 1 << 29, 1 << 30
_LEAST, _LOWEST_POWER = 1e-300, -310  # smaller numbers are 0


@dataclass(frozen=True, eq=False)
class Payload:
    """The numbers of a page."""

    facts: dict[str, Any]
    """Plain JSON: the meaning of the numbers in `packed`."""
    packed: str
    """base64 of deflated byte planes."""
    grid: Grid
    digits: int
    """Digits of each statistic."""


def payload(table: Table, good: Table | None = None, room: int = MAX_BYTES) -> Payload:
    """The payload of all rows of a run, with light rows (`Run.table(phase=None)`).

    A run that does not fit has fewer columns; before it has fewer than 48, its statistics have two digits.

    Args:
        good: the full rows of a run to compare with; the page draws its curves beside those of the run.
    """
    full = table.where(phase="full")
    light = len(full) < len(table)
    main = full if len(full) else table
    most, digits = _MOST_LOOKS, _DIGITS
    columns = {name: main.metric(name) for name in progress(STATISTICS, "making the page")}
    filled = main.has_histograms() | main.has_histograms("row_sqnr")
    while True:
        grid = Grid.of(main, most, columns=columns)
        series = Grid.of(table, most, _SERIES, by="amax") if light and len(full) else None
        beside = Grid.of(good, most) if good is not None and len(good) else None
        facts, codes = _facts((main, good), grid, series, beside, digits, filled, _MAX_HISTOGRAMS * room // MAX_BYTES)
        packed = pack(codes, 4)
        if len(packed) <= room or most <= _LEAST_LOOKS:
            return Payload(facts, pack(codes), grid, digits)
        fits = int(0.97 * room / len(packed) * len(grid.looks))
        coarser = fits < _ENOUGH_LOOKS and digits == _DIGITS
        most, digits = (min(most, 2 * fits), _DIGITS - 1) if coarser else (fits, digits)
        most = max(_LEAST_LOOKS, most)


class _Numbers:
    """Collects arrays, each once, and says where they are."""

    def __init__(self) -> None:
        self.codes: list[npt.NDArray[np.int32]] = []
        self.kinds: list[tuple[int, int]] = []
        self._places: dict[bytes, int] = {}
        self._end = 0

    def add(self, values: Values, digits: int) -> int:
        """The place of the first number; 0 digits: whole numbers, which stay exact."""
        values = values.ravel()
        if (
            digits == 0
            and np.abs(values, where=np.isfinite(values), out=np.zeros(len(values))).max(initial=0) >= _INFINITE
        ):
            digits = max(_FINE.values())
        codes = coded(values, digits)
        place = self._places.setdefault(bytes([digits]) + sha256(codes.tobytes()).digest(), self._end)
        if place == self._end:
            self.codes.append(codes)
            self.kinds.append((len(codes), digits))
            self._end += len(codes)
        return place

    def grid(self, grid: Grid, names: Sequence[str], digits: int) -> dict[str, Any]:
        """Looks by their first steps, and the places of statistics and of the steps: from the look's first, or -1."""
        firsts = [first for first, _ in grid.looks]
        starts = {"step": self.add(np.where(grid.step < 0, -1.0, grid.step - np.array(firsts)), 0)}
        for name in names:
            whole = STATISTICS[name].unit == "elements"
            starts[name] = self.add(grid.values[name], 0 if whole else _FINE.get(name, digits))
        return {"firsts": firsts, "starts": starts}


def _facts(
    tables: tuple[Table, Table | None],
    grid: Grid,
    series: Grid | None,
    beside: Grid | None,
    digits: int,
    filled: npt.NDArray[np.bool_],
    histograms: int,
) -> tuple[dict[str, Any], npt.NDArray[np.int32]]:
    table, good = tables
    names = [name for name in STATISTICS if name in grid.values]
    numbers = _Numbers()
    facts: dict[str, Any] = {
        "slots": [{**slot._asdict(), "symbol": symbol(slot.tensor)} for slot in grid.slots],
        "groups": grid.groups(),
        "looks": grid.looks,
        "own": numbers.grid(grid, names, digits),
        "metrics": [_metric(name, grid.values[name]) for name in names],
        "floor": [None if np.isnan(v) else round(float(v), 2) for v in grid.floor],
        "formats": _formats(),
    }
    for name, other, wanted in (("series", series, list(_SERIES)), ("good", beside, names)):
        if other is not None:
            present = [statistic for statistic in wanted if statistic in other.values]
            alarming = [round(share, 3) for share in other.alarming()]
            facts[name] = numbers.grid(other, present, digits) | {"slots": _places(grid, other), "alarming": alarming}
    chosen = _chosen(grid, filled, histograms)
    facts["histograms"], counts = _histograms(table, grid, chosen)
    facts["counts"] = numbers.add(counts, _DIGITS)
    if good is not None and beside is not None:
        own = good.has_histograms() | good.has_histograms("row_sqnr")
        shown = [_beside(grid, beside, own, facts["good"]["slots"][slot], look) for slot, look in chosen]
        facts["good"]["histograms"], counts = _histograms(good, beside, sorted({one for one in shown if one}))
        facts["good"]["counts"] = numbers.add(counts, _DIGITS)
    facts["kinds"] = numbers.kinds
    return facts, np.concatenate(numbers.codes)


def _places(grid: Grid, other: Grid) -> list[int]:
    """For each cast of the page its row in another grid: the same cast, or else one of the same tensor by another
    recipe; -1 for none."""
    places = {slot[:3]: i for i, slot in reversed(list(enumerate(other.slots)))}
    exact = {slot: i for i, slot in enumerate(other.slots)}
    return [exact.get(slot, places.get(slot[:3], -1)) for slot in grid.slots]


def coded(values: Values, digits: int) -> npt.NDArray[np.int32]:
    """Numbers as whole codes of so many decimal digits, in the order of their sizes; 0 digits: the whole number itself.

    Example:
        >>> coded(np.array([0.0, 1.28503, -1.28503]), 3).tolist(), coded(np.array([12345.0]), 0).tolist()
        ([0, 279030, -279030], [12345])
    """
    known = np.isfinite(values)
    if digits == 0:
        codes = np.where(known, values, 0).astype(np.int64)
    else:
        rounded = all_rounded(values) if digits == _DIGITS else values
        some = known & (np.abs(values) >= _LEAST)
        size = np.abs(np.where(some, rounded, 1.0))
        power = np.floor(np.log10(size) + 1e-12).astype(np.int64)
        scaled = np.rint(size / 10.0**power * 10 ** (digits - 1)).astype(np.int64)
        first = 10 ** (digits - 1)
        code = 1 + (power - _LOWEST_POWER) * 9 * first + scaled - first  # 9.996 is 10.0: the next power's first code
        codes = np.where(some, np.where(values < 0, -code, code), 0)
    infinite = np.where(values < 0, -_INFINITE, _INFINITE)
    return np.where(known, codes, np.where(np.isnan(values), _UNKNOWN, infinite)).astype(np.int32)  # all fit


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


def pack(codes: npt.NDArray[np.int32], level: int = 9) -> str:
    """Codes as base64 of deflated byte planes, the highest byte first; a lower level is quicker, and longer.

    Example:
        >>> import base64, zlib
        >>> zlib.decompress(base64.b64decode(pack(np.array([1, 258])))).hex()
        '0000000000010102'
    """
    planes = codes.astype(">i4").view(np.uint8).reshape(-1, 4).T
    return deflated(np.ascontiguousarray(planes).tobytes(), level)


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


def _chosen(grid: Grid, filled_rows: npt.NDArray[np.bool_], most: int) -> list[tuple[int, int]]:
    """Slot and look of the histograms on the page: for each cast the worst look, and as many others as fit."""
    others = max(0, most // max(1, len(grid.slots)) - 1)
    alarm = np.nan_to_num(grid.alarm()[0], nan=-1e9, posinf=1e9, neginf=-1e8)
    chosen: list[tuple[int, int]] = []
    for slot in range(len(grid.slots)):
        looks = [k for k in np.flatnonzero(grid.row[slot] >= 0).tolist() if filled_rows[grid.row[slot, k]]]
        if looks:
            worst = looks[int(np.argmax(alarm[slot, looks]))]
            chosen += [(slot, look) for look in sorted({worst, *_spread(looks, others)})]
    return chosen


def _beside(
    grid: Grid, other: Grid, filled_rows: npt.NDArray[np.bool_], slot: int, look: int
) -> tuple[int, int] | None:
    """Slot and look of another grid's histogram beside one of this grid: its last up to the end of the look."""
    firsts = [first for first, _ in other.looks] if slot >= 0 else []
    seen = [k for k, first in enumerate(firsts) if first <= grid.looks[look][1] and filled_rows[other.row[slot, k]]]
    return next(((slot, k) for k in reversed(seen) if other.row[slot, k] >= 0), None)


def _histograms(table: Table, grid: Grid, chosen: Sequence[tuple[int, int]]) -> tuple[list[list[int]], Values]:
    """[slot, look, then first bin and bins of each histogram], and the counts of all histograms in a row."""
    tallies = table.take([grid.row[slot, look] for slot, look in chosen]).tallies  # all tallies would fill the memory
    entries = [[slot, look] for slot, look in chosen]
    counts: list[Values] = [np.zeros(0)]
    for i, entry in enumerate(entries):
        for name in ("exponents", "row_sqnr", "block_spread"):
            bins = np.asarray(getattr(tallies, name)[i])
            filled = np.flatnonzero(bins)
            first, last = (int(filled[0]), int(filled[-1]) + 1) if len(filled) else (0, 0)
            entry += [first, last - first]
            counts.append(bins[first:last])
    return entries, np.concatenate(counts)


def _spread(items: Sequence[int], most: int) -> list[int]:
    """Up to `most` items, evenly spread, with the last and the first."""
    if len(items) <= most:
        return list(items)
    return [items[i] for i in np.linspace(len(items) - 1, 0, most).round().astype(int)]
