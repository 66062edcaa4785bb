"""`ottava diagnose` and `ottava compare`: what is wrong with a run, and where it left a good one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ottava.base.text import columns, to_json

if TYPE_CHECKING:
    from ottava.diagnose.compare import Comparison
    from ottava.diagnose.diagnose import Diagnosis, Finding

SCHEMA_VERSION = 2
_SEVERITIES = ("critical", "warning", "never")


def diagnose(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a watched run.")],
    baseline: Annotated[
        Path | None, typer.Option("--baseline", metavar="RUN", help="The same training in BF16, or a good run.")
    ] = None,
    framework: Annotated[
        str | None,
        typer.Option("--for", metavar="NAME", help="Print changes for this framework, not for that which ran."),
    ] = None,
    fail_on: Annotated[
        str, typer.Option("--fail-on", metavar="NAME", help="Exit 1 from this severity on: critical, warning, never.")
    ] = "critical",
    every: Annotated[bool, typer.Option("--all", help="Show the triage tree, and each law that lacks data.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> int:
    """Explain a run: what happened, whether FP8 did it, and what to do.

    The watch made experiments while the run trained: it computed the gradient of a batch with casts and without, and
    turned casts off until the error was gone. FP8 is blamed only by such an experiment. Everything else is told from
    facts: learning rates, parameters, batches, and laws that a training step cannot break. With --baseline, facts that
    differ from the good run come before statistics.

    Exit code 1 if a finding is at least as severe as --fail-on.
    """
    from ottava.base.errors import unknown_name
    from ottava.diagnose.diagnose import diagnose as explain
    from ottava.diagnose.remedies import FRAMEWORKS
    from ottava.record.reader import Run

    for option, value, choices in (("--fail-on", fail_on, _SEVERITIES), ("--for", framework, FRAMEWORKS)):
        if value is not None and value not in choices:
            raise ValueError(unknown_name(f"value of {option}", value, choices))
    good = None if baseline is None else Run.open(baseline)
    result = explain(Run.open(run), baseline=good, framework=framework)
    values = {"schema_version": SCHEMA_VERSION, "run": str(run), **result.to_dict()}
    typer.echo(to_json(values) if as_json else _text(result, every))
    return 1 if fail_on != "never" and result.fails(fail_on) else 0


def _text(result: Diagnosis, every: bool) -> str:
    lines = [result.sentence]
    if result.event and result.event not in result.sentence:
        lines += ["", f"What happened: {result.event}"]
    if result.tried:
        lines += ["", "Tried"] + [f"  {sentence}" for sentence in result.tried]
    for number, finding in enumerate(result.findings, 1):
        lines += ["", *_finding(number, finding)]
    if result.notes:
        lines += ["", "Also seen; it may be meant"] + [f"  {note.title}. {note.cause}" for note in result.notes]
    if result.forecast:
        lines += ["", "If you switch this model to FP8"] + [f"  {sentence}" for sentence in result.forecast]
    if every:
        lines += ["", "Triage"]
        for step in result.questions:
            needs = f" (needs {'; '.join(step['needs'])})" if step["needs"] else ""
            said = f"  {step['say']}" if step["say"] else ""
            lines.append(f"  {step['id']:4} {step['question']} {step['answer']}{needs}{said}")
        lines += ["", f"Laws: {result.tested} tested" + (", not tested:" if result.untested else "")]
        lines += [f"  {law['id']:4} {law['title']}: needs {law['needs']}" for law in result.untested]
    else:
        missing = f", {len(result.untested)} lack data" if result.untested else ""
        lines += ["", f"{result.tested} laws tested{missing} (--all shows them, and the triage tree)"]
    return "\n".join(lines)


def _finding(number: int, finding: Finding) -> list[str]:
    right = finding.confidence
    sure = "" if right is None else f"; such first answers to unseen faults: {right[0]} of {right[1]} right"
    when = f", step {finding.steps[0]}" if finding.steps else ""
    lines = [f"{number}. {finding.title}  ({finding.severity}{when}{sure})", f"   {finding.cause}"]
    lines += [f"   {sentence}" for sentence in finding.tried]
    for letter, remedy in zip("abcdefgh", finding.remedies, strict=False):
        cost = "" if remedy["cost"] == "nothing" else f" Costs {remedy['cost']}."
        lines.append(f"   {letter}) {remedy['text']}{cost}")
        for framework, patch in remedy["patch"].items():
            lines += [f"      {framework}:"] + [f"        {line}" for line in patch.splitlines()]
    return lines


def compare(
    good: Annotated[Path, typer.Argument(metavar="GOOD", help="Folder of the run that went well.")],
    bad: Annotated[Path, typer.Argument(metavar="BAD", help="Folder of the run that went wrong.")],
    align: Annotated[str, typer.Option("--align", metavar="AXIS", help="Pair looks by step, or by tokens.")] = "step",
    control: Annotated[
        list[Path] | None,
        typer.Option("--control", metavar="RUN", help="Another good run, of another seed; repeatable."),
    ] = None,
    top: Annotated[int, typer.Option("--top", metavar="N", help="Rows of the table.")] = 15,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> int:
    """Compare a good run with a bad one: settings first, then which tensor left the good run's band, and when.

    The table is ranked by bits lost per element. 6 dB of SQNR are one bit. An element that the cast flushed or clipped
    lost all of its bits. Eight octaves of growth count as one bit.

    The band of a statistic is the range of the good run around that step; --control widens it.

    Exit code 1 if the loss or a tensor of the bad run left the band of the good one.
    """
    from ottava.diagnose.compare import compare as compare_runs
    from ottava.record.reader import Run

    runs = [Run.open(path) for path in (good, bad, *(control or ()))]
    result = compare_runs(runs[0], runs[1], align=align, controls=runs[2:])
    values = {"schema_version": SCHEMA_VERSION, "good": str(good), "bad": str(bad), **result.to_dict()}
    typer.echo(to_json(values) if as_json else _compared(result, top))
    return 1 if result.diverged else 0


def _compared(result: Comparison, top: int) -> str:
    from ottava.measure.layer_names import symbol

    lines = [result.verdict, "", "Settings that differ" if result.config else "Settings: none differ"]
    if result.config:
        lines += columns(("", "good", "bad"), *((f"  {d['key']}", d["good"], d["bad"]) for d in result.config))
    if result.unmatched:
        lines += ["", f"Only in one run: {', '.join(result.unmatched[:8])}"]
    if result.first is not None and result.first["then"]:
        lines += ["", f"Then: {', '.join(result.first['then'])}"]
    rows = [
        [
            f"  {entry['layer']}",
            symbol(entry["tensor"], entry["direction"]),
            entry["metric"],
            f"{entry['good']:.4g}",
            f"{entry['bad']:.4g}",
            f"{entry['effect']:+.3g} {entry['unit']}",
            f"{entry['bits']:.2f}",
            entry["step"],
        ]
        for entry in result.ranked[:top]
    ]
    lines += ["", f"Largest differences, of {result.steps_compared} looks"]
    head = ["  layer", "tensor", "statistic", "good", "bad", "effect", "bits lost", "step"]
    return "\n".join(lines + (columns(head, *rows) if rows else ["  none"]))
