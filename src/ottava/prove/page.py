"""The pages of `ottava certify` and `ottava check`: one HTML file without other files, on the report's frame."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ottava.base.text import elide
from ottava.base.untrusted import read_text
from ottava.prove.certificate import KernelCertificate
from ottava.prove.prover import Judged, Verdict
from ottava.report.charts import Band, Chart, Line
from ottava.report.frame import render

_MOST_POINTS, _MOST_ROWS, _LONGEST = 240, 400, 72
_PHASES = MappingProxyType(
    {"weight": "start", "update": "update", "buffer": "update"}
    | dict.fromkeys(("recomputed", "output gradient", "input gradient", "gradient"), "backward")
)
"""Where a kind of tensor lies in a step; all others lie in the forward."""


def page(found: Sequence[KernelCertificate], settings: Mapping[str, Any]) -> str:
    """All certificates as HTML."""
    return render("ottava.prove", "certify.html.j2", found=found, settings=settings, headline=headline(found))


def headline(found: Sequence[KernelCertificate]) -> str:
    """What all certificates say together."""
    bad = sum(not one.good for one in found)
    return f"{bad} of {len(found)} adapters are wrong" if bad else f"No fault found in {len(found)} adapters"


def check_page(verdict: Verdict, command: str = "") -> str:
    """What `check` found as HTML: the first tensor that differs, every difference beside its limit, the rows.

    Args:
        verdict: of tensors or of logs.
        command: repeats it; empty: none is known.
    """
    found, source = verdict.finding, verdict.reproducer
    headline = f"{elide(verdict.names[1], 40)} computes what {elide(verdict.names[0], 40)} computes"
    if found is not None:
        rank = f", rank {found.rank}" if found.rank is not None else ""
        step = f", step {found.key.step + 1}" if found.key.step else ""
        headline = f"The first tensor that differs: {elide(str(found.key), _LONGEST)}, {found.phase}{rank}{step}"
    wrong_first = sorted(range(len(verdict.judged)), key=lambda i: not verdict.judged[i].wrong)
    return render(
        "ottava.prove",
        "check.html.j2",
        verdict=verdict,
        found=found,
        headline=headline,
        wrong=sum(j.wrong for j in verdict.judged),
        first=verdict.around(),
        rows=[verdict.judged[i] for i in sorted(wrong_first[:_MOST_ROWS])],
        chart=_differences(verdict) if verdict.judged else None,
        equal=sum(j.far.whole == 0 == j.far.element for j in verdict.judged),
        command=command,
        longest=_LONGEST,
        reproducer=read_text(source) if source is not None and source.is_file() else "",
    )


def _differences(verdict: Verdict) -> Chart:
    """Each tensor's difference and limit over its place in the program.

    Of too many neighbours the worst has a point, and the first that is wrong in any case.
    """
    judged = verdict.judged
    first = next((i for i, j in enumerate(judged) if j.wrong), -1)
    every = math.ceil(len(judged) / _MOST_POINTS)

    def beyond(one: Judged) -> float:
        far, limit = one.far[one.worst], one.limit[one.worst]
        return far / limit if limit else math.inf if far else 0.0

    near = (range(start, min(start + every, len(judged))) for start in range(0, len(judged), every))
    shown = [max(places, key=lambda i: (i == first, beyond(judged[i]))) for places in near]
    far, limit = ({i: getattr(judged[i], name)[judged[i].worst] for i in shown} for name in ("far", "limit"))
    known = [x for x in (*far.values(), *limit.values()) if 0 < x < math.inf] or [1.0]
    low, high = min(known) / 3, 10 * max(known)
    far = {i: min(x, high / 2) for i, x in far.items()}  # one that is not finite lies above all others
    wrong = {i: x for i, x in far.items() if judged[i].wrong}

    def line(name: str, style: int, values: Mapping[int, float], *, measured: bool = True) -> Line:
        points = [(i + 1.0, y) for i, y in values.items() if y > 0]
        return Line(name=name, points=points, style=style, markers=measured, joined=not measured)

    phases = [_PHASES.get(j.row.key.kind, "forward") for j in judged]
    marks = [(i + 1.0, name) for i, name in enumerate(phases) if i == 0 or name != phases[i - 1]]
    return Chart(
        title="Difference of each tensor",
        description="The difference of each tensor, and the most that rounding explains, in the order of the program.",
        x_label="place in the program",
        y_label="relative",
        bands=[Band(name="rounding explains it", points=[(i + 1.0, low, y) for i, y in limit.items()])],
        lines=[
            line("limit", 0, limit, measured=False),
            line("within its limit", 1, {i: x for i, x in far.items() if i not in wrong}),
            line("beyond its limit", 2, wrong),
        ],
        x_range=(0.5, len(judged) + 0.5),
        y_range=(low, high),
        marks=sorted([*marks, *([(first + 1.0, "the first")] if wrong else [])]),
        names=[(i + 1.0, elide(str(judged[i].row.key), _LONGEST)) for i in shown],
        log=True,
        width=760,
        height=380,
    )
