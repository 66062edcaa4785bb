"""One page of what `ottava parity` found: the certificate, the answers to text, the causes of a rollout's KL.

A part that was not asked for is not on the page. The headline is the sentence of the first part.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ottava.base.files import replacing
from ottava.report.charts import Chart, Line
from ottava.report.frame import render
from ottava.serving.attribution import CAUSES, Attribution
from ottava.serving.evaluate import Evaluation
from ottava.serving.parity import Certificate


def render_page(
    certificate: Certificate | None = None, answers: Evaluation | None = None, rollout: Attribution | None = None
) -> str:
    """The page as one HTML document.

    Raises:
        ValueError: nothing was found that could be shown.
    """
    parts = [one for one in (certificate, answers, rollout) if one is not None]
    if not parts:
        raise ValueError("render_page: needs a certificate, answers or a rollout; got none of them")
    headline, _, rest = parts[0].headline.partition(": ")
    if " " not in headline:  # one word is no headline
        headline, rest = parts[0].headline, ""
    blocks = [] if answers is None else [(one.total, one.own) for one in answers.blocks]
    layers = [] if certificate is None else [(row.layer, row.kl) for row in certificate.rows if row.kl is not None]
    return render(
        __package__ or "",
        "parity.html.j2",
        headline=headline[:1].upper() + headline[1:],
        rest=rest,
        good=all(one.good for one in parts),
        certificate=certificate,
        found=answers,
        rollout=rollout,
        meanings=CAUSES,
        kl=_of_linears([kl for _, kl in layers]) if layers else None,
        layers=layers,
        chart=_of_blocks(blocks) if blocks else None,
        texts=[] if answers is None else answers.rows,
        tensors=[] if answers is None else sorted(answers.weights.tensors, key=lambda one: not one.wrong),
        shown=_shown,
    )


def write_page(path: Path, page: str) -> Path:
    """Writes the page, whole or not at all, and returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as scratch:
        scratch.write_text(page, encoding="utf-8")
    return path


def _of_blocks(errors: Sequence[tuple[float, float]]) -> Chart:
    total, own = ([(float(i), y) for i, y in enumerate(side)] for side in zip(*errors, strict=True))
    return Chart(
        title="Error behind each block",
        description="Relative error of the hidden state behind each block, and of each block alone on A's stream.",
        x_label="block",
        y_label="relative error",
        lines=[
            Line(name="so far", points=total, style=1, markers=True),
            Line(name="of this block alone", points=own, style=2, markers=True),
        ],
        x_range=(0, max(1, len(total) - 1)),
        log=any(y > 0 for _, y in (*total, *own)),
    )


def _of_linears(kls: Sequence[float]) -> Chart:
    return Chart(
        title="KL of each linear that differs, alone",
        description="Nats a token if only this linear is the engine's, in the order of execution.",
        x_label="linear",
        y_label="KL, nats a token",
        lines=[Line(name="KL alone", points=[(float(i), kl) for i, kl in enumerate(kls)], style=2, markers=True)],
        x_range=(0, max(1, len(kls) - 1)),
        log=any(kl > 0 for kl in kls),
    )


def _shown(values: str) -> str:
    """Generated text on one line, with its blanks."""
    return values.replace("\n", "⏎")
