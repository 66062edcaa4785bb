"""The first line of a diagnosis: the worst finding, or that there is none, and how much of the run was seen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ottava.diagnose.rows import Context
from ottava.measure.layer_names import SYMBOLS


def headline(findings: Sequence[Any], notes: Sequence[Any], coverage: float, context: Context, tested: str) -> str:
    """One or two sentences.

    Args:
        findings, notes: of `diagnose`, worst first.
        coverage: share of seen layers [%]; NaN if unknown.
        tested: how many rules had the data they need.
    """
    steps = len(context.run.steps["step"])
    ended = context.run.manifest.get("ended")
    end = f" The run did not end: its record stops after step {max(context.run.steps['step'], default=0)}." * (
        ended == ""
    )
    if ended not in (None, "", "closed"):
        end = f" The run ended after step {max(context.run.steps['step'], default=0)} with {str(ended)[:120]}."
    if findings:
        rest = len(findings) - 1
        more = f"; {rest} more finding{'s' if rest > 1 else ''}" if rest else ""
        return f"{findings[0].severity}: {findings[0].title}{_worst(findings[0])}{more}.{_simulated(context)}{end}"
    seen = "coverage unknown" if math.isnan(coverage) else f"coverage {coverage:.0f} %"
    looked = f"{seen}, {steps} step{'s' if steps != 1 else ''} seen, {tested}." if steps else f"{seen}, {tested}."
    note = ""
    if notes:
        more = f"; {len(notes) - 1} more" if len(notes) > 1 else ""
        note = f" Not FP8, but look at this: {notes[0].title}{_worst(notes[0])}{more}."
    return f"no FP8 evidence found; {looked}{_ill(context)}{note}{end}"


def _ill(context: Context) -> str:
    """When the loss of an ill run left its band, for the first time and for good."""
    loss = context.loss
    if math.isinf(min(loss.onset, loss.diverged_at)):
        return ""
    twin = () if context.baseline is None else (context.baseline_loss,)
    band, (left, stays) = "the baseline's band", loss.exits(*twin)
    if math.isinf(left) or not twin:
        band, (left, stays) = "the band of its own noise", loss.exits()
    ends = (
        ""
        if math.isinf(stays)
        else ", and its running median stays outside" + (f" from step {stays:.0f} on" if stays > left else "")
    )
    return f" But the loss leaves {band} at step {left:.0f}{ends}."


def _simulated(context: Context) -> str:
    sources = set(context.table["source"])
    return " The layers run in BF16: these casts are simulated." if sources == {"hook"} else ""


def _worst(finding: Any) -> str:
    """The worst evidence, in parentheses."""
    if not finding.evidence:
        return f" ({', '.join(finding.layers[:3])})" if finding.layers else ""
    worst = finding.evidence[0]
    value = f"{worst.value:.4g}" if isinstance(worst.value, float) else worst.value
    where = f"{worst.layer}.{SYMBOLS.get(worst.tensor, worst.tensor)}: ".replace(".: ", ": ") if worst.layer else ""
    unit = f" {worst.unit}" if worst.unit else ""
    at = "" if worst.step is None else f" at step {worst.step}"
    return f" ({where}{worst.metric} {value}{unit}{at})"
