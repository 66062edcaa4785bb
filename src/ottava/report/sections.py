"""The words and tables of the page: findings, what-if, difference, coverage, and how to run it again.

The time axis has the loss with fewer points, events as marks and in words, and the worst tensor of each look. The facts
of an event fill its sentence in `SENTENCES`; an event that has none, or lacks a fact, becomes a list of its facts.

These functions turn the plain dicts of the analysis functions and of the manifest into rows. They leave out a row whose
keys are missing, because imported runs have fewer facts.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from ottava.base.text import duration, grouped, listed, number, steps_text
from ottava.diagnose.compare import said_of_lead
from ottava.diagnose.what_if import Prediction, cheapest, summary
from ottava.measure.layer_names import starred, symbol
from ottava.measure.limits import gradient_level
from ottava.measure.statistics import STATISTICS
from ottava.numerics.formats import FORMATS
from ottava.report.charts import Bars
from ottava.report.grid import SCALES, Grid, Values, Worst

Json = Mapping[str, Any]

FRAMEWORKS = MappingProxyType(
    {
        "ottava": "ottava",
        "megatron": "Megatron",
        "te": "TransformerEngine",
        "torchao": "torchao",
        "transformers": "Hugging Face Trainer",
        "lightning": "Lightning",
        "torch": "PyTorch",
    }
)
"""Key in a remedy's patch -> name on the tab."""
WORST_COLUMNS = (
    *("row_sqnr_p50_db", "underflow_pct", "underflow_pct_numel", "overflow_pct"),
    *("scale_error_max", "sqnr_db", "kurtosis", "amax"),
)
"""Statistics in the table of all tensors, if the run has them."""
WHAT_IF_ROWS, WORST_ROWS = 16, 40


def finding(entry: Json, grid: Grid) -> dict[str, Any]:
    """A finding of a Diagnosis, as the page shows it."""
    evidence = [_evidence(item, grid) for item in entry.get("evidence") or []]
    first, last = (*(entry.get("steps") or ()), None, None)[:2]
    layers = list(entry.get("layers") or [])
    where = listed(layers, most=4)
    if tensors := [symbol(t) for t in entry.get("tensors") or []]:
        where = f"{', '.join(tensors)} of {where}" if where else ", ".join(tensors)
    return {
        "id": str(entry.get("id", "")),
        "title": str(entry.get("title", entry.get("id", ""))),
        "severity": str(entry.get("severity", "warning")),
        "where": where,
        "all_layers": layers if len(layers) > 4 else [],
        "when": steps_text(int(first), int(last)) if first is not None and last is not None else "",
        "cause": _sentence(entry.get("cause")),
        "confidence": entry.get("confidence"),
        "tried": [str(sentence) for sentence in entry.get("tried") or []],
        "evidence": evidence,
        "remedies": [_remedy(item) for item in entry.get("remedies") or []],
    }


def _evidence(item: Json, grid: Grid) -> dict[str, Any]:
    metric = str(item.get("metric", ""))
    statistic = STATISTICS.get(metric)
    unit = str(item.get("unit") or (statistic.unit if statistic else ""))
    return {
        "layer": str(item.get("layer") or ""),
        "tensor": symbol(str(item.get("tensor") or "")),
        "metric": metric,
        "meaning": statistic.meaning if statistic else "",
        "value": _value(item.get("value"), unit),
        "step": item.get("step"),
        "link": _link(item, grid),
    }


def _sentence(text: Any) -> str:
    words = str(text or "").strip()
    return words[:1].upper() + words[1:] + ("" if words.endswith((".", "!", "?")) else ".") if words else ""


def _value(value: Any, unit: str) -> str:
    if not unit and isinstance(value, (int, float)) and math.isfinite(value) and value == int(value):
        return f"{int(value):,}"  # a count
    return number(float(value), unit) if isinstance(value, (int, float)) and not isinstance(value, bool) else str(value)


def _link(item: Json, grid: Grid) -> str:
    """The fragment that selects the cell of an evidence; "" if the page does not have it."""
    metric, step = item.get("metric"), item.get("step")
    for i, slot in enumerate(grid.slots):
        if slot.layer == item.get("layer") and slot.tensor == item.get("tensor"):
            parts = [f"slot={i}"]
            parts += [f"metric={metric}"] if metric in grid.values else []
            parts += [f"step={int(step)}"] if isinstance(step, (int, float)) else []
            return "#" + "&".join(parts)
    return ""


def _remedy(item: Json) -> dict[str, Any]:
    patch = item.get("patch") or {}
    patches = [(FRAMEWORKS.get(key, key), str(text)) for key, text in patch.items() if text]
    return {"text": str(item.get("text", "")), "cost": str(item.get("cost") or ""), "patches": patches}


def headline(diagnosis: Json) -> str:
    """The answer in a few words: the title of the first finding, or else the first sentence."""
    findings = diagnosis.get("findings") or []
    return str(findings[0]["title"]) if findings else str(diagnosis["sentence"]).partition(". ")[0].rstrip(".")


def rest(diagnosis: Json) -> str:
    """What the sentence of the verdict says beyond the headline, the findings and the experiments below it."""
    findings = diagnosis.get("findings") or []
    told = [headline(diagnosis), *(str(one.get("cause") or "") for one in findings), *(diagnosis.get("tried") or [])]
    words = str(diagnosis["sentence"])
    if diagnosis.get("coverage_pct") is not None:  # the page's small print
        words = re.sub(r"The watch saw \S+ % of the linear layers\.", "", words)
    for sentence in sorted((str(one).strip(" .") for one in told), key=len, reverse=True):
        words = re.sub(rf"(FP8(?: is innocent)?: )?{re.escape(sentence)}\.", "", words) if sentence else words
    return " ".join(words.split())


def experiment(lines: Sequence[Json], formats: Iterable[str]) -> dict[str, Any]:
    """The shadow steps of a run: one batch with casts and without.

    Args:
        formats: of the run's casts; the level depends on the narrowest.

    Returns:
        steps; error, and the noise of the batch, in percent of the gradient; level: below it casts do not hurt, %;
        rows: step, error, noise, loss with casts and without, None where it is unknown.
    """
    rows = []
    for one in lines:
        error, ratio = _finite(one.get("error")), _finite(one.get("noise"))  # noise: the error as a multiple of it
        if one.get("kind") == "shadow" and error is not None:
            noise = 100 * error / ratio if ratio else None
            losses = (_finite(one.get(key)) for key in ("loss", "loss_without"))
            rows.append((int(one["step"]), 100 * error, noise, *losses))
    return {
        "steps": [row[0] for row in rows],
        "error": [row[1] for row in rows],
        "noise": [row[2] for row in rows],
        "level": 100 * gradient_level(min((FORMATS[name].bits for name in formats if name in FORMATS), default=8)),
        "rows": rows,
    }


def decisive(lines: Sequence[Json], shadow: Json, diagnosis: Json) -> tuple[Bars, str] | None:
    """The experiment that shows the answer, as a picture and its caption; None if none was made.

    Args:
        shadow: what `experiment` returns.

    Returns:
        If the answer is the learning rate: a batch before and after its step. Else the final losses of the last replay
        that came out as the run did; without one the shadow step that the answer tells of, or that with the largest
        error.
    """
    replay = next((one for one in reversed(lines) if one.get("kind") == "replay" and one.get("reproduces")), None)
    rows: list[tuple[str, float | None]] = []
    worst, unit, rest = 0, "", "var(--s1)"
    if (step := _step_of_rate(lines, diagnosis)) is not None:
        title, said = f"The batch of step {step['step']}", "Loss of the same batch, nothing else changed."
        part = "tenth" if (_finite(step.get("loss_tenth")) or math.inf) < step["loss"] else "thousandth"
        names = {"before its step": "loss", "after its step": "loss_after", f"after a {part} of it": f"loss_{part}"}
        rows, worst = [(name, _finite(step.get(key))) for name, key in names.items()], 1
    elif replay is not None:
        names = {"as it ran": "with casts", "high precision": "without casts"}
        title = f"Steps {replay['from']} to {replay['step']} replayed"
        said = "Loss at the end, from the same weights and batches."
        for arm in replay.get("arms") or ():
            name = str(arm.get("name"))
            rows.append((names.get(name, name), _finite((arm.get("losses") or [None])[-1])))
    elif shadow["rows"] and diagnosis.get("fp8") != "none":  # casts that nobody made show nothing of the answer
        told = " ".join(
            [*(diagnosis.get("tried") or ()), *(str(f.get("cause")) for f in diagnosis.get("findings") or ())]
        )
        asked = {int(number) for number in re.findall(r"[Aa]t step (\d+)", told)[:1]}
        chosen = [row for row in shadow["rows"] if row[0] in asked] or shadow["rows"]
        at, error, noise, *losses = max(chosen, key=lambda row: row[1])
        title = f"One batch of step {at}, with and without casts"
        said, unit, rest = "Distance of the gradients, % of their length.", "%", "var(--line)"
        rows = [("error by casts", error), ("level that hurts", shadow["level"])]
        rows += [] if noise is None else [("noise of the batch", noise)]
        if None not in losses:
            said += f" Loss with casts {number(losses[0])}, without {number(losses[1])}."
    else:
        return None
    texts = ["not finite" if value is None else number(value, unit) for _, value in rows]
    picture = Bars(
        title=title,
        description="; ".join(f"{name}: {text}" for (name, _), text in zip(rows, texts, strict=True)),
        x_label=unit or "loss",
        parts=[("", "var(--s2)"), ("", rest)],
        bars=[
            (name, [value or 0.0, 0.0] if i == worst else [0.0, value or 0.0], text)
            for i, ((name, value), text) in enumerate(zip(rows, texts, strict=True))
        ],
        unit="",
    )
    return picture, said


def _step_of_rate(lines: Sequence[Json], diagnosis: Json) -> Json | None:
    """The shadow step after which a batch was worse, if the answer is the learning rate."""
    found = [*(diagnosis.get("findings") or ()), *(diagnosis.get("notes") or ())]
    answers = {str(remedy.get("name")) for one in found[:1] for remedy in one.get("remedies") or ()}
    steps = {step for one in found if one.get("id") == "O12" for step in one.get("steps") or ()}
    if not answers & {"good_lr", "lower_lr"}:
        return None
    return next(
        (one for one in lines if one.get("kind") == "shadow" and one["step"] in steps and "loss_after" in one), None
    )


def tried(diagnosis: Json) -> list[str]:
    """What was tried, less what a finding says as its cause."""
    causes = " ".join(str(one.get("cause") or "") for one in diagnosis.get("findings") or [])
    return [str(one) for one in diagnosis.get("tried") or [] if str(one) not in causes]


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def questions(diagnosis: Json) -> list[tuple[str, str, str]]:
    """The path through the triage tree: number, question, answer with its meaning."""
    return [
        (one["id"], one["question"], "; ".join(filter(None, [one["answer"], one["say"], *one["needs"]])))
        for one in diagnosis.get("questions") or []
    ]


def untested(diagnosis: Json) -> list[tuple[str, str, str]]:
    """Laws that lack data: name, title, needs."""
    return [(one["id"], one["title"], one["needs"]) for one in diagnosis.get("untested") or []]


def worst_table(grid: Grid, runs: int = 1) -> dict[str, Any]:
    """The most alarming casts at their most alarming look, worst first; fewer rows where several runs share a page.

    Returns:
        columns: statistics; rows: slot, layer, tensor, cast, step, and for each column a text and a level 0 to 3;
        more: number of casts left out.
    """
    columns = [name for name in WORST_COLUMNS if name in grid.values]
    if "underflow_pct" in columns and "underflow_pct_numel" in columns:
        columns.remove("underflow_pct_numel")  # only for runs of tools that have no other
    level = grid.alarm()[0]
    known = np.where(np.isnan(level), -np.inf, level)
    best = np.where(grid.row >= 0, known, -np.inf)
    order = np.argsort(-best.max(1, initial=-np.inf), kind="stable")[: WORST_ROWS // runs].tolist()
    rows: list[dict[str, Any]] = []
    for i in order:
        slot, looks = grid.slots[i], np.flatnonzero(grid.row[i] >= 0)
        at = int(looks[np.argmax(known[i, looks])])
        cells = []
        for name in columns:
            value = float(grid.values[name][i, at])
            danger = float(SCALES[name].levels(value, grid.floor[i])) if name in SCALES else 0.0
            shade = 0 if math.isnan(danger) else int(min(3, max(0, 4 * danger)))
            cells.append((number(value, STATISTICS[name].unit), shade))
        row = {"slot": i, "layer": slot.layer, "tensor": symbol(slot.tensor), "cast": cast_text(slot._asdict())}
        rows.append(row | {"step": int(grid.step[i, at]), "alarm": float(level[i, at]), "cells": cells})
    return {"columns": [STATISTICS[name] for name in columns], "rows": rows, "more": len(grid.slots) - len(rows)}


def cast_text(slot: Json) -> str:
    """A cast in a few words: E4M3[tensor, delayed], and "of the transpose" if it is."""
    facts = [slot["granularity"], *(slot[key] for key in ("scale_format", "scaling") if slot[key] not in _PLAIN)]
    inside = ", ".join(fact for fact in facts if fact)
    turned = " of the transpose" if slot["direction"] == "col" else ""
    return f"{slot['format']}[{inside}]{turned}" if inside else f"{slot['format']}{turned}"


_PLAIN = frozenset({"fp32", "current", ""})


def what_if(predictions: Sequence[Prediction], runs: int = 1) -> dict[str, Any] | None:
    """Predictions by recipe, and by tensor if a recipe fails for it; None without predictions.

    Returns:
        recipes: rows of `what_if.summary`; cheapest: (recipe, number and names of its layers); columns and rows: the
        tensors for which some recipe fails; more: number of rows left out; unharmed: tensors that every recipe clears.
    """
    if not predictions:
        return None
    recipes = list(dict.fromkeys(p.recipe for p in predictions))
    tensors: dict[tuple[str, str], dict[str, Prediction]] = {}
    for p in predictions:
        cells = tensors.setdefault((p.layer, p.tensor), {})
        other = cells.get(p.recipe)
        if other is None or (p.clears, _or_zero(p.element_sqnr_db)) < (other.clears, _or_zero(other.element_sqnr_db)):
            cells[p.recipe] = p  # the worse of both directions
    failing = {key: cells for key, cells in tensors.items() if not all(p.clears for p in cells.values())}
    order = sorted(failing, key=lambda key: -sum(not p.clears for p in failing[key].values()))
    layers = grouped((name or "none of these", layer) for layer, name in cheapest(predictions).items())
    return {
        "recipes": summary(predictions),
        "cheapest": [(name, len(names), listed(names, most=3)) for name, names in layers.items()],
        "columns": recipes,
        "rows": [
            (key[0], symbol(key[1]), [failing[key].get(name) for name in recipes])
            for key in order[: WHAT_IF_ROWS // runs]
        ],
        "more": max(0, len(order) - WHAT_IF_ROWS // runs),
        "unharmed": len(tensors) - len(failing),
    }


def _or_zero(value: float | None) -> float:
    return 0.0 if value is None or math.isnan(value) else value


def difference(comparison: Json) -> dict[str, Any]:
    """A Comparison, as the page shows it."""
    ranked = []
    # effects of all statistics are ranked in bits
    effects = [abs(_or_zero(item.get("bits", item.get("effect")))) for item in comparison.get("ranked") or []]
    top = max((e for e in effects if math.isfinite(e)), default=0.0) or 1.0
    for item, effect in zip((comparison.get("ranked") or [])[:25], effects, strict=False):
        statistic = STATISTICS.get(item["metric"])
        unit = statistic.unit if statistic else ""
        row = {"layer": item["layer"], "tensor": symbol(item["tensor"]), "metric": item["metric"]}
        row |= {key: _value(item.get(key), unit) for key in ("good", "bad")} | {"step": item.get("step")}
        row |= {"effect": _value(item.get("effect"), str(item.get("unit") or ""))}
        ranked.append(row | {"bar": round(100 * min(1.0, effect / top), 1)})
    return {
        "verdict": str(comparison.get("verdict") or ""),
        "config": [{k: str(row.get(k)) for k in ("key", "good", "bad")} for row in comparison.get("config") or []],
        "first": _first(comparison.get("first")),
        "loss": _loss_facts(comparison.get("loss") or {}),
        "ranked": ranked,
        "more": max(0, len(comparison.get("ranked") or []) - len(ranked)),
        "unmatched": listed(map(str, comparison.get("unmatched") or []), most=6),
    }


def _first(first: Json | None) -> str:
    if not first:
        return ""
    unit = STATISTICS[first["metric"]].unit if first.get("metric") in STATISTICS else ""
    low, high = (*(first.get("good_band") or ()), None, None)[:2]
    text = (
        f"Step {int(first['step']):,}: {symbol(str(first['tensor']))} of {first['layer']}, {first['metric']} is "
        f"{_value(first.get('value'), unit)}"
    )
    if low is not None and high is not None:
        text += f"; the good run stays between {number(float(low), unit)} and {number(float(high), unit)}"
    lead = said_of_lead({"lead_steps": None, "look_before": None, **first})
    text += lead and f". It leaves{lead.removeprefix(',')}"
    spread = first.get("direction")
    return text + (f". It spreads through the {spread}." if spread else ".")


def _loss_facts(loss: Json) -> str:
    parts = []
    for key, words in (("left_at", "first outside at step"), ("diverged_at", "stays outside from step")):
        if loss.get(key) is not None:
            parts.append(f"{words} {int(loss[key]):,}")
    for key, unit in (("good", ""), ("bad", ""), ("gap", "%")):
        if isinstance(loss.get(key), (int, float)):
            parts.append(f"{key} {number(float(loss[key]), unit)}")
    return ", ".join(parts)


def facts_of_run(manifest: Json) -> list[tuple[str, str]]:
    """Versions and machine, one line each."""
    versions, host = manifest.get("versions") or {}, manifest.get("host") or {}
    lines = [
        ("started", str(manifest.get("started") or "")),
        ("versions", ", ".join(f"{name} {value}" for name, value in versions.items())),
        ("machine", ", ".join(_plain(host.get(key)) for key in ("device", "platform") if host.get(key))),
        ("processes", _plain(host.get("world_size"))),
    ]
    return [(name, text) for name, text in lines if text]


def settings_of_run(manifest: Json) -> list[tuple[str, list[tuple[str, str]]]]:
    """The settings of the training and of the watch, as pairs."""
    sections = (("training", manifest.get("config")), ("watch", manifest.get("settings")))
    return [(title, [(k, _plain(v)) for k, v in values.items()]) for title, values in sections if values]


def command(manifest: Json) -> str:
    """The command line of the run; "" if unknown."""
    words = manifest.get("command") or []
    return words if isinstance(words, str) else shlex.join(map(str, words))


def coverage(manifest: Json, grid: Grid) -> dict[str, Any]:
    """The layers that the watch saw, those that it missed with the reason, and its cost."""
    noted, cost = manifest.get("coverage") or {}, manifest.get("overhead") or {}
    layers = len({slot.layer for slot in grid.slots})
    sentence = f"The run has statistics of {layers:,} layer{'s' * (layers != 1)}"
    if isinstance(noted.get("linear"), int):
        sentence = f"The watch saw {noted.get('seen', layers):,} of {noted['linear']:,} linear layers"
    share = cost.get("share")
    costs = "" if share is None else f"Watching took {number(100 * float(share), '%')} of the run's time"
    if costs and all(isinstance(cost.get(key), (int, float)) for key in ("watching_s", "total_s")):
        costs += f", {duration(float(cost['watching_s']))} of {duration(float(cost['total_s']))}"
    if costs and isinstance(cost.get("looks"), int):
        costs += f", in {cost['looks']:,} look{'s' * (cost['looks'] != 1)}"
    skipped = [(str(item.get("name", "")), str(item.get("why", ""))) for item in noted.get("skipped") or []]
    sources = sorted({slot.source for slot in grid.slots})
    return {"sentence": sentence, "skipped": skipped, "cost": costs, "sources": [_SOURCES.get(s, s) for s in sources]}


_SOURCES = MappingProxyType(
    {
        "door": "the operands of the GEMMs",
        "hook": "casts simulated beside the GEMMs, which ran in the model's own precision",
    }
)


def layer_rows(manifest: Json) -> list[dict[str, Any]]:
    """The layers of the model, from the manifest; layers that differ only in the number in their name share a row."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for layer in manifest.get("layers") or []:
        name = str(layer.get("name", ""))
        facts = [*(str(layer.get(key, "")) for key in ("kind", "type", "source")), _plain(layer.get("recipe"))]
        shape = " × ".join(str(n) for n in layer.get("shape") or [])
        rows.setdefault((starred(name)[0], shape, *facts), []).append(name)
    fields = ("shape", "kind", "type", "source", "recipe")
    return [
        {"name": names[0] if len(names) == 1 else pattern, "count": len(names), **dict(zip(fields, facts, strict=True))}
        for (pattern, *facts), names in rows.items()
    ]


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {_plain(item)}" for key, item in value.items())
    if isinstance(value, Iterable) and not isinstance(value, str):
        return ", ".join(_plain(item) for item in value)
    return "" if value is None else str(value)


QUIET = frozenset({"burst", "flight", "dump", "overhead"})
"""Events about the watch, not about the training: only in the table, not in the picture."""


def thin(steps: npt.NDArray[np.int64], values: Values, most: int) -> list[list[float | None]]:
    """At most `most` points of a series with its peaks: the first lowest and the first highest of each stretch.

    Returns:
        [steps, values]; None for a value that is not finite.

    Example:
        >>> thin(np.arange(6), np.array([1.0, 9.0, 1.0, 1.0, 1.0, np.nan]), most=4)
        [[0, 1, 3, 5], [1.0, 9.0, 1.0, None]]
    """
    keep = np.arange(len(steps))
    if len(steps) > most:
        peaks: set[int] = {0, len(steps) - 1}
        for chunk in np.array_split(keep, max(1, most // 2)):
            finite = chunk[np.isfinite(values[chunk])]
            if len(finite):
                peaks |= {int(finite[np.argmin(values[finite])]), int(finite[np.argmax(values[finite])])}
        keep = np.array(sorted(peaks))
    shown = [float(v) if math.isfinite(v) else None for v in values[keep]]
    return [[int(step) for step in steps[keep]], shown]


def not_finite_from(steps: npt.NDArray[np.int64], values: Values) -> int | None:
    """The step from which no value is finite; None if the last value is finite, or no value ever was.

    Example:
        >>> not_finite_from(np.array([1, 2, 3]), np.array([2.0, np.nan, np.inf]))
        2
    """
    finite = np.flatnonzero(np.isfinite(values))
    if not len(finite) or finite[-1] == len(values) - 1:
        return None
    return int(steps[finite[-1] + 1])


def marks(events: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Events, as the page shows them: step, kind, letter, quiet, text.

    Example:
        >>> marks([{"step": 7, "rank": 0, "kind": "resumed"}])
        [{'step': 7, 'kind': 'resumed', 'letter': 'R', 'quiet': False, 'text': 'the run was resumed after this step'}]
    """
    return [
        {
            "step": int(event["step"]),
            "kind": KIND_NAMES.get(kind, kind),
            "letter": kind[:1].upper(),
            "quiet": kind in QUIET,
            "text": event_text(event),
        }
        for event in sorted(events, key=lambda event: int(event["step"]))
        for kind in [str(event.get("kind", "event"))]
    ]


KIND_NAMES = MappingProxyType({"burst": "closer look", "flight": "amaxes stored"})
"""Kind of an event -> the name that people read; other kinds are their own."""
SENTENCES: Mapping[str, str] = MappingProxyType(
    {
        "trigger clipping": "the cast clipped {value_pct} of {tensor_symbol} of {layer}; the limit is {threshold_pct}",
        "trigger row_sqnr": "the median row of {tensor_symbol} of {layer} has {value} dB; the limit is {threshold} dB",
        "trigger loss_z": "the loss lies {value} deviations above the median of the last 32; the limit is {threshold}",
        "trigger scale_error": "the predicted scale of {tensor_symbol} of {layer} is {value} octaves from the current "
        "one; the limit is {threshold}",
        "trigger scale_drift": "the scale of {tensor_symbol} of {layer} is {value} octaves from the median of its last "
        "looks; the limit is {threshold}",
        "trigger history": "the history of {tensor_symbol} of {layer} is saturated: it predicts the scale {value}",
        "trigger nonfinite": "{tensor_symbol} of {layer} has an infinity or NaN",
        "trigger nonfinite, no tensor": "the loss is not finite",
        "burst": "every step up to {until} gets a full look",
        "flight": "stored the amaxes of steps {first} to {last}: {why}",
        "jump": "the amax of {tensor_symbol} of {layer} goes from {before} to {after} in one step",
        "overhead": "watching took {share_pct} of the time; now a look every {every} steps, amaxes every {light_every}",
        "dump": "wrote {tensor_symbol} of {layer} to {file}, {nbytes} bytes",
        "resumed": "the run was resumed after this step",
        "fallback": "{layer}, {gemm}: from {from} to {to}, because {why}; applied: {applied}",
        "spike": "loss {loss}, {z} deviations up; {replayed_loss} replayed in high precision; cause: {cause}; {action}",
        "rewind": "the training went back to step {to}",
        "warning": "{text}",
    }
)
"""Kind, or kind and reason -> sentence. `NAME_pct` is a fact in percent, `tensor_symbol` the tensor's symbol."""
_SHOWN_ELSEWHERE = frozenset({"step", "rank", "kind"})


def event_text(event: Mapping[str, Any]) -> str:
    """The sentence of an event, without step and kind.

    Example:
        >>> event_text({"step": 7, "kind": "burst", "until": 1023})
        'every step up to 1,023 gets a full look'
        >>> event_text({"step": 7, "kind": "of a later version", "value": 0.02})
        'value 0.0200'
    """
    kind = str(event.get("kind", ""))
    if "reason" in event:
        kind = f"{kind} {event['reason']}"
    facts = {key: fact(value) for key, value in event.items()}
    facts |= {f"{key}_pct": number(100 * value, "%") for key, value in event.items() if isinstance(value, float)}
    if "tensor" in event:
        facts["tensor_symbol"] = symbol(str(event["tensor"]))
    elif f"{kind}, no tensor" in SENTENCES:
        kind = f"{kind}, no tensor"
    try:
        return SENTENCES[kind].format_map(facts)
    except KeyError:
        return ", ".join(f"{key} {text}" for key, text in facts.items() if key in event and key not in _SHOWN_ELSEWHERE)


def fact(value: Any) -> str:
    """A value of an event as text.

    Example:
        >>> [fact(v) for v in (True, None, 65536, 0.5, "bf16", [1])]
        ['yes', 'unknown', '65,536', '0.500', 'bf16', '[1]']
    """
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "unknown"}[value]
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return number(value)
    return value if isinstance(value, str) else json.dumps(value)


def worst_runs(grid: Grid, worst: Sequence[Worst | None]) -> list[dict[str, Any]]:
    """The strip of worst tensors in words; neighbouring looks with the same worst tensor and statistic are one row.

    Returns:
        first and last step, layer, tensor (symbol), metric, and the worst value with its step and slot.
    """
    runs: list[dict[str, Any]] = []
    for (first, last), cell in zip(grid.looks, worst, strict=True):
        if cell is None:
            continue
        slot = grid.slots[cell.slot]
        place = {"layer": slot.layer, "tensor": symbol(slot.tensor), "metric": cell.metric}
        step = int(grid.step[cell.slot, cell.look])
        peak = {"value": cell.value, "level": cell.level, "step": step, "slot": cell.slot}
        if runs and all(runs[-1][key] == value for key, value in place.items()) and runs[-1]["slot"] == cell.slot:
            runs[-1]["last"] = last
            if cell.level > runs[-1]["level"]:
                runs[-1] |= peak
        else:
            runs.append({"first": first, "last": last, **place, **peak})
    return runs
