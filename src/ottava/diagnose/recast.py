"""What recipes would do to the tensors that a run has dumped: the real casts, where no histogram can say it.

A transform mixes the elements of a tensor, and a rule for block scales looks at all of them, so their errors need the
tensor itself. A watch writes tensors with `dump: {steps: [...], rows: 0}`. Operands of a GEMM are cast in the order of
a training step, so that the second takes the first one's signs and factors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ottava.diagnose.expected_error import Expected
from ottava.diagnose.what_if import Prediction, judged
from ottava.numerics.tensor import QuantizedTensor
from ottava.ops.quantize import quantize
from ottava.recipe import CELL_OF, GEMMS, TENSOR_OF, TENSORS, Recipe
from ottava.record.dumps import GemmDump, TensorDump, read_dump
from ottava.record.random_state import random_states_kept
from ottava.record.schema import DUMPS

Place = tuple[str, str, str]
"""(layer, tensor, direction)."""
_NOTE = "casts of dumped tensors"


def recast(run: Path | str, predictions: Iterable[Prediction], recipes: Sequence[Recipe]) -> list[Prediction]:
    """Fills the unknown predictions with numbers of real casts of the tensors that the run has dumped.

    Args:
        run: the run folder.
        predictions: of `what_if.predict`, for these recipes.
    Raises:
        DumpError: a dump is damaged.
    Edge cases: dumps of some rows only are left out, and so are cells with a predicted scale.

    Example: see `ottava what-if`.
    """
    predictions = list(predictions)
    unknown = {p.recipe for p in predictions if not p.steps}
    wanted = [recipe for recipe in recipes if recipe.name in unknown]
    sums: dict[tuple[str, Place], dict[int, Any]] = {}
    paths = sorted((Path(run) / DUMPS).glob("*.safetensors")) if wanted else []
    for _, files in groupby(paths, lambda path: path.name.split(".")[:2]):  # step and rank
        for layer, (step, tensors) in _layers(files).items():
            for recipe in wanted:
                for place, found in _casts(layer, recipe, tensors).items():
                    steps = sums.setdefault((recipe.name, place), {})
                    steps[step] = steps.get(step, 0) + found
    by_name = {recipe.name: recipe for recipe in wanted}
    places = ((p.recipe, (p.layer, p.tensor, p.direction)) for p in predictions)
    return [_filled(p, by_name.get(p.recipe), sums.get(place)) for p, place in zip(predictions, places, strict=True)]


def _layers(files: Iterable[Path]) -> dict[str, tuple[int, dict[str, Tensor]]]:
    """Layer -> the step, and its whole tensors as x (R, C)."""
    layers: dict[str, tuple[int, dict[str, Tensor]]] = {}
    for path in files:
        dump = read_dump(path)
        if isinstance(dump, GemmDump):
            layers[dump.layer] = dump.step, dict(zip(TENSORS, (dump.x, dump.w, dump.dy), strict=True))
        elif isinstance(dump, TensorDump) and dump.rows is None and (dump.key.tensor, dump.key.direction) in CELL_OF:
            x = dump.x if dump.key.direction == "row" else dump.x.t()
            layers.setdefault(dump.key.layer, (dump.step, {}))[1].setdefault(dump.key.tensor, x)
    return layers


@torch.no_grad()
def _casts(layer: str, recipe: Recipe, tensors: Mapping[str, Tensor]) -> dict[Place, Any]:
    """The fields of `Expected`, as one array, for each cell that is cast with the tensor's own scale."""
    resolved, found = recipe.for_layer(layer), {}
    for gemm in GEMMS:
        first: QuantizedTensor | None = None
        sides = sorted(("lhs", "rhs"), key=lambda side: TENSORS.index(TENSOR_OF[gemm, side][0]))
        for side in sides:
            (tensor, direction), spec = TENSOR_OF[gemm, side], getattr(getattr(resolved, gemm), side)
            alone = first is None and side == sides[1]
            if spec is None or spec.predicted or tensor not in tensors:
                continue
            if alone and spec.transform is not None and spec.transform.each_column:
                continue  # its factors are those of the other operand
            x = tensors[tensor] if direction == "row" else tensors[tensor].t()
            with random_states_kept():
                first = quantize(x, spec, beside=first)
            found[layer, tensor, direction] = _sums(first.transformed(x).double(), first)
    return found


def _sums(x: Tensor, x_q: QuantizedTensor) -> Any:
    exact, near = x, x_q.dequantize(torch.float32).double()
    used = exact.isfinite() & (exact != 0)
    scale_inv = x_q.spec.granularity.expand(x_q.scale_inv, (x.shape[0], x.shape[1])).double()
    clipped = x_q.spec.format.clips(exact.abs(), scale_inv) & used
    exact, near = exact[used], near[used]
    error, relative = exact - near, (exact - near).abs() / exact.abs()
    columns = (used, near == 0, clipped, relative, relative.square(), exact.square(), error.square())
    return np.array([float(column.sum(dtype=torch.float64)) for column in columns])


def _filled(unknown: Prediction, recipe: Recipe | None, steps: Mapping[int, Any] | None) -> Prediction:
    if recipe is None or steps is None or unknown.steps:
        return unknown
    gemm, side = CELL_OF[unknown.tensor, unknown.direction]
    spec = getattr(getattr(recipe.for_layer(unknown.layer), gemm), side)
    place = unknown.layer, unknown.tensor, unknown.direction, recipe.name
    return judged(place, spec, np.array(list(steps)), Expected(*np.stack(list(steps.values())).T), [_NOTE])
