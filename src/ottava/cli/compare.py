"""`ottava compare`: compares a good run with a bad one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ottava.base.text import columns, to_json

if TYPE_CHECKING:
    from ottava.diagnose.compare import Comparison

SCHEMA_VERSION = 1


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
    typer.echo(to_json(values) if as_json else _text(result, top))
    return 1 if result.diverged else 0


def _text(result: Comparison, top: int) -> str:
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
