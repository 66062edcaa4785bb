"""Pictures for notebooks, drawn by matplotlib: curves over steps, a map of numbers, the cells of a recipe.

`Run.plot`, `Observation.plot` and `Recipe.plot` hand plain data over. Matplotlib is imported here, and nowhere else.
Figures are transparent, and text and lines keep their contrast on white and on a dark page.
"""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

INK = "#7a7a7a"
"""Text and axes: 4.2 to 1 on white and on a page of #131416."""
LINES = ("#2b7bd0", "#c75b12", "#2c8f5f", "#a05fc0", "#9a7d0a", "#c2477a")
"""Curves, in this order: at least 3 to 1 on both pages."""
BITS = MappingProxyType({4: "#f2a65a", 8: "#7fb2e5", 16: "#d9d9d9"})
"""The face of a recipe's cell by the bits of its format; its text is black."""
_SPANS = MappingProxyType({"%": (0.0, 5.0), "dB": (0.0, 40.0)})
"""Unit -> what its colours span at least, so that a difference of nothing does not look like damage."""


def figure(width: float, height: float, rows: Sequence[float] = (1.0,)) -> tuple[Any, Any]:
    """A transparent figure of matplotlib, in inches, with axes one below the other; notebooks show it as PNG.

    Args:
        rows: relative heights of the axes, which share their x.
    Returns:
        The figure and a list of its axes.
    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plot: needs matplotlib, which is not installed; pip install 'ottava[plot]'") from error
    drawn = Figure(figsize=(width, height), layout="constrained", facecolor="none")
    axes = drawn.subplots(len(rows), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": [*rows]})[
        :, 0
    ].tolist()
    for one in axes:
        one.set_facecolor("none")
        one.tick_params(colors=INK, labelsize=8)
        for side, spine in one.spines.items():
            spine.set_color(INK)
            spine.set_visible(side in ("left", "bottom"))

    def png() -> bytes:
        file = io.BytesIO()
        drawn.savefig(file, format="png", dpi=110)
        return file.getvalue()

    drawn._repr_png_ = png  # type: ignore[attr-defined,unused-ignore]  # without pyplot no notebook would show it
    return drawn, axes


def curves(axes: Any, lines: Mapping[str, tuple[Any, Any]], label: str) -> None:
    """Curves with a legend if there are several; a positive one that spans a factor of 30 gets a logarithmic axis.

    Args:
        lines: name -> (x, y).
    """
    for (name, (x, y)), color in zip(lines.items(), LINES * len(lines), strict=False):
        axes.plot(x, y, color=color, linewidth=1.4, label=name)
    known = np.concatenate([np.asarray(y, dtype=float) for _, y in lines.values()]) if lines else np.zeros(0)
    known = known[np.isfinite(known)]
    if len(known) and known.min() > 0 and known.max() > 30 * known.min():
        axes.set_yscale("log")
    axes.set_ylabel(label, color=INK, fontsize=9)
    if len(lines) > 1:
        axes.legend(labelcolor=INK, frameon=False, fontsize=8)


def map_of(
    axes: Any, values: Any, rows: Sequence[str], edges: Sequence[float], *, bad: str, unit: str, label: str
) -> Any:
    """Numbers as colours, one row below the other; what hurts is dark, and what is not known is grey.

    Args:
        values: (rows, columns); NaN is unknown.
        edges: columns + 1 places on the x axis.
        bad: "high" or "low" values hurt; "": neither.
        unit: of the numbers; "%" and "dB" have colours that span a least range.
    Returns:
        The mesh, whose `get_array()` has the numbers.
    """
    shown = np.ma.masked_invalid(np.asarray(values, dtype=float))
    colors = "YlOrRd_r" if bad == "low" else "YlOrRd"
    low, high = _SPANS.get(unit, (math.inf, -math.inf))
    span = {"vmin": min(low, shown.min()), "vmax": max(high, shown.max())} if shown.count() else {}
    mesh = axes.pcolormesh(edges, np.arange(len(rows) + 1), shown, cmap=colors, **span)
    axes.add_patch(_behind(edges, len(rows)))
    axes.set_yticks(np.arange(len(rows)) + 0.5, rows)
    axes.invert_yaxis()
    bar = axes.figure.colorbar(mesh, ax=axes, fraction=0.04, pad=0.01)
    bar.set_label(label, color=INK, fontsize=9)
    bar.ax.tick_params(colors=INK, labelsize=8)
    bar.outline.set_edgecolor(INK)
    return mesh


def _behind(edges: Sequence[float], rows: int) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((edges[0], 0), edges[-1] - edges[0], rows, facecolor="#80808033", edgecolor="none", zorder=-1)


def edges_of(steps: Sequence[float]) -> list[float]:
    """The borders of columns around these steps, halfway to their neighbours.

    Example:
        >>> edges_of([1, 2, 4]), edges_of([7])
        ([0.5, 1.5, 3.0, 5.0], [6.5, 7.5])
    """
    if len(steps) < 2:
        return [steps[0] - 0.5, steps[0] + 0.5] if steps else [0.0, 1.0]
    between = [(a + b) / 2 for a, b in itertools.pairwise(steps)]
    return [2 * steps[0] - between[0], *between, 2 * steps[-1] - between[-1]]


def worst_first(values: Any, bad: str) -> list[int]:
    """Numbers of rows by their worst value; rows without one come last.

    Example:
        >>> worst_first([[1.0, 9.0], [math.nan, 3.0], [math.nan, math.nan]], "low")
        [0, 1, 2]
    """
    sign = -1.0 if bad == "low" else 1.0
    worst = [max((sign * value for value in row if not math.isnan(value)), default=-math.inf) for row in values]
    return sorted(range(len(worst)), key=lambda row: -worst[row])


def cells(title: str, rows: Sequence[str], texts: Sequence[Sequence[str]], bits: Sequence[Sequence[int]]) -> Any:
    """A table of coloured cells; a text that is too long for its cell is broken behind a comma.

    Args:
        bits: of each cell: a key of BITS.
    """
    drawn, (axes,) = figure(8.0, 0.5 + 0.62 * len(rows))
    from matplotlib.patches import Rectangle

    for y, (line, widths) in enumerate(zip(texts, bits, strict=True)):
        for x, (text, width) in enumerate(zip(line, widths, strict=True)):
            axes.add_patch(Rectangle((x + 0.01, y + 0.06), 0.98, 0.88, facecolor=BITS[width], edgecolor="none"))
            axes.text(x + 0.5, y + 0.5, _broken(text), ha="center", va="center", fontsize=8, color="black")
    axes.set(xlim=(0, len(texts[0])), ylim=(len(rows), 0), xticks=[])
    axes.set_yticks(np.arange(len(rows)) + 0.5, rows)
    axes.set_title(title, color=INK, fontsize=10)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.tick_params(length=0)
    return drawn


def _broken(text: str, width: int = 44) -> str:
    if len(text) <= width:
        return text
    cut = text.rfind(", ", 0, width) + 1
    return f"{text[:cut]}\n{_broken(text[cut + 1 :], width)}" if cut else text
