"""Watches the doors of a model: measures every cast of the input, weight and grad_output of every layer.

A forward hook on each Quantizer sees the very tensor and operands that the GEMMs get, so nothing is simulated and the
training step has the same bits with and without. Outside the context there are no hooks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ottava.base.errors import need, need_known
from ottava.base.text import columns, data_frame, html_table, number
from ottava.engine.quantizer import Doors
from ottava.measure.layer_names import symbol
from ottava.measure.statistics import STATISTICS
from ottava.measure.tally import Detail, Tally
from ottava.measure.walk import measure_packed
from ottava.numerics.tensor import QuantizationSpec, QuantizedTensor
from ottava.weights.parameter import is_quantized_weight

Key = tuple[str, str, str, QuantizationSpec]
"""(layer, tensor, direction, spec)."""
_SHOWN = ("row_sqnr_p50_db", "underflow_pct", "overflow_pct", "amax")
"""Statistics that a printed observation shows; `table` has all of them."""


class Observation:
    """The tallies of all casts, merged over calls. It prints the table of `_SHOWN`, the worst cast first.

    Example: see `observe`.
    """

    def __init__(self) -> None:
        self.tallies: dict[Key, Tally] = {}

    def __repr__(self) -> str:
        layers = len({layer for layer, *_ in self.tallies})
        return f"<Observation: {len(self.tallies)} casts of {layers} layers; print it for the worst first>"

    def __str__(self) -> str:
        rows = self._rows()
        return "\n".join(columns(*rows)) if rows[1:] else "no casts: no ottava layer ran in FP8 in this context"

    def _repr_html_(self) -> str:
        return html_table(self._rows(), f"{len(self.tallies)} casts, the worst first")

    def to_pandas(self) -> Any:
        """A `pandas.DataFrame` with the rows of `table`."""
        return data_frame(self.table())

    def plot(self, statistic: str = "row_sqnr_p50_db") -> Any:
        """A statistic of every cast as a map: layers below each other, tensors beside (`pip install 'ottava[plot]'`).

        Args:
            statistic: a name of `ottava.debug.STATISTICS`.
        Returns:
            A matplotlib Figure.
        Raises:
            ValueError: the statistic is unknown, or nothing was cast.
        """
        from ottava.base import plot

        need_known("", "statistic", statistic, STATISTICS)
        if not self.tallies:
            raise ValueError("plot: no casts were seen: no ottava layer ran in FP8 in this context")
        found = {(row["layer"], symbol(row["tensor"], row["direction"])): row[statistic] for row in self.table()}
        layers, tensors = (list(dict.fromkeys(names)) for names in zip(*found, strict=True))
        values = [[found.get((layer, tensor), math.nan) for tensor in tensors] for layer in layers]
        drawn, (axes,) = plot.figure(1.6 + 1.1 * len(tensors), 0.8 + 0.26 * len(layers))
        one = STATISTICS[statistic]
        plot.map_of(axes, values, layers, range(len(tensors) + 1), bad=one.worse, unit=one.unit, label=one.unit)
        axes.set_xticks([place + 0.5 for place in range(len(tensors))], tensors)
        axes.set_title(statistic, color=plot.INK, fontsize=10)
        return drawn

    def _rows(self) -> list[tuple[str, ...]]:
        casts = sorted(self.table(), key=lambda row: known_or_last(row["row_sqnr_p50_db"]))
        rows: list[tuple[str, ...]] = [("layer", "tensor", "cast", *_SHOWN)]
        for row in casts:
            numbers = (number(row[name], STATISTICS[name].unit) for name in _SHOWN)
            cast = f"{row['format']}[{row['granularity']}]"
            rows.append((row["layer"], symbol(row["tensor"], row["direction"]), cast, *numbers))
        return rows

    def add(self, key: Key, tally: Tally) -> None:
        """Merges one cast."""
        self.tallies[key] = self.tallies.get(key, Tally()) + tally

    def table(self) -> list[dict[str, Any]]:
        """One row per layer x tensor x direction: format, granularity and every statistic.

        direction "row" is x as fprop (for grad_output: dgrad) contracts it; "col" is x.T if it has a cast of its own.
        """
        rows = []
        for (layer, tensor, direction, spec), tally in self.tallies.items():
            place = {"layer": layer, "tensor": tensor, "direction": direction}
            cast = {"format": spec.format.name, "granularity": str(spec.granularity)}
            rows.append({**place, **cast, **{s.name: s.finish(tally) for s in STATISTICS.values()}})
        return rows


@contextmanager
def observe(model: nn.Module, *, detail: Detail = "blocks") -> Iterator[Observation]:
    """Collects statistics of every cast in the ottava layers of a model while the context lasts.

    Args:
        detail: "anatomy" adds the parts of each error, see `measure.walk`; the others leave histograms out.

    Edge cases: layers in high precision cast nothing and have no rows. Every cast waits for the GPU, so observe a few
    steps only. Compiled models run eagerly in the context, because compiled code calls no hooks.

    Example:
        >>> import torch, ottava
        >>> model = nn.Sequential(nn.Linear(64, 64)).bfloat16()
        >>> report = ottava.convert(model, "tensorwise")
        >>> with ottava.debug.observe(model) as seen:
        ...     model(torch.ones(4, 64, dtype=torch.bfloat16)).sum().backward()
        >>> [(row["tensor"], row["format"], row["underflow_pct"]) for row in seen.table()]
        [('input', 'E4M3', 0.0), ('weight', 'E4M3', 0.0), ('grad_output', 'E5M2', 0.0)]
    """
    need("observe", model, nn.Module)
    seen = Observation()

    def measure(layer: str, tensor: str, door: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if args := in_numbers(args):
            for direction, x, x_q in casts_of(args[0], *output):
                seen.add((layer, tensor, direction, x_q.spec), measure_packed(x, x_q, detail=detail).tally())

    with ExitStack() as stack, torch.compiler.set_stance("force_eager"):
        for name, module in model.named_modules():
            layer = name.removesuffix("quantizers").removesuffix(".")
            for tensor, door in module.named_children() if isinstance(module, Doors) else ():
                stack.enter_context(door.register_forward_hook(partial(measure, layer, tensor)))
        yield seen


def known_or_last(value: float) -> float:
    """A key to sort by, smallest first: NaN comes last."""
    return math.inf if math.isnan(value) else value


def in_numbers(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a door, with an FP8 weight decoded exactly; () if the recipe decodes such a weight, because it
    casts nothing then."""
    weight, cell, *rest = args
    if not is_quantized_weight(weight):
        return args
    with torch.no_grad():
        return () if cell is None else (weight.dequantize(torch.float32), cell, *rest)


def casts_of(x: Tensor, row: Any, col: Any) -> Iterator[tuple[str, Tensor, QuantizedTensor]]:
    """The casts of x at a door: ("row", x, cast of x), and ("col", x.T, cast of x.T) if that has its own codes. A
    matrix that was transformed before its cast is given as it was cast."""
    memory = row.data.data_ptr() if isinstance(row, QuantizedTensor) else None
    if memory is not None:
        yield "row", row.transformed(x), row
    if isinstance(col, QuantizedTensor) and col.data.data_ptr() != memory:
        yield "col", col.transformed(x.t()), col
