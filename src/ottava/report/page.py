"""Makes the report of a run: one HTML file that needs no other file and opens anywhere.

The template (report.html.j2) has the words, report.js draws the pictures. Every picture has a table with the same
numbers, which also works without JavaScript.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import numpy as np

from ottava.base import text
from ottava.base.files import replacing
from ottava.diagnose.compare import compare
from ottava.diagnose.diagnose import diagnose
from ottava.diagnose.what_if import Prediction, predict, thinned
from ottava.measure.layer_names import symbol
from ottava.measure.statistics import STATISTICS
from ottava.record.amaxes import recorded
from ottava.record.reader import Run
from ottava.report import sections
from ottava.report.frame import render, script_json
from ottava.report.grid import Grid
from ottava.report.payload import payload

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
        asked = thinned(table, max(4, _MOST_PREDICTED_ROWS // len(table.slots())))
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
    facts = numbers.facts | {
        "loss": _curves(run),
        "baseline": _curves(baseline) if baseline is not None else None,
        "events": events,
        "worst": [None if w is None else [w.slot, w.metric, w.value, w.level] for w in worst],
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
