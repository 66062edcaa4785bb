"""One page of what `ottava parity` found: the certificate, the answers to text, the causes of a rollout's KL.

A part that was not asked for is not on the page. The headline is the sentence of the first part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
    blocks = () if answers is None else answers.blocks
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
        kl=_row(
            "KL of each linear that differs, alone",
            "Nats a token if only this linear is the engine's, in the order of execution.",
            ("linear", "nats a token"),
            {"KL alone": (2, [kl for _, kl in layers])},
        ),
        layers=layers,
        chart=_row(
            "Error behind each block",
            "Relative error of the hidden state behind each block, and of each block alone on A's stream.",
            ("block", "relative error"),
            {"so far": (1, [one.total for one in blocks]), "of this block alone": (2, [one.own for one in blocks])},
        ),
        texts=[] if answers is None else answers.rows,
        tensors=[] if answers is None else sorted(answers.weights.tensors, key=lambda one: not one.wrong),
    )


def _row(
    title: str, said: str, labels: tuple[str, str], lines: Mapping[str, tuple[int, Sequence[float]]]
) -> Chart | None:
    """A chart over the places in a row; lines: name -> style, and the number at each place. None: there is no place."""
    if not all(values for _, values in lines.values()):
        return None
    return Chart(
        title=title,
        description=said,
        x_label=labels[0],
        y_label=labels[1],
        lines=[
            Line(
                name=name, points=[(float(i), y) for i, y in enumerate(values)], style=style, markers=True, joined=False
            )
            for name, (style, values) in lines.items()
        ],
        x_range=(0, max(1, *(len(values) - 1 for _, values in lines.values()))),
        log=any(y > 0 for _, values in lines.values() for y in values),
    )
