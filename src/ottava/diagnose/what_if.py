"""Predicts underflow and error of every recipe, tensor by tensor, from the histograms of one run, without training.

Tests compare predictions with measured casts of Gaussian, log-normal, outlier and SwiGLU tensors. For every FP8 recipe
underflow is within 1 point, mean relative error within 0.006, element SQNR within 0.5 dB, SQNR within 1.5 dB. If a few
elements have most of a tensor's energy, its SQNR depends on their luck and may be off by 5 dB. Blocks of 1x16 and 16x16
(NVFP4) have no histograms; their numbers are estimates, with underflow within 15 points. A prediction cannot tell how
another recipe would change the training itself, and thereby later tensors. Micro-batches merged into one row share its
largest amax.

A cell clears if underflow, SQNR and element SQNR clear the floors of `FLOORS` in every recorded step.

A transform mixes the elements of a tensor, and a rule for block scales looks at all of them, so their errors need the
tensor itself: `recast` casts the tensors that a watch has dumped with `dump: {steps: [...], rows: 0}`. Operands of a
GEMM are cast in the order of a training step, so that the second takes the first one's signs and factors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ottava.base.text import finite, grouped, progress
from ottava.diagnose.expected_error import Array, Expected, current_scale, expect
from ottava.diagnose.history import predict_scales
from ottava.measure import limits
from ottava.measure.layer_names import SYMBOLS, only_simulated
from ottava.measure.statistics import decibels
from ottava.numerics.scaling import BLOCK_128X128, PER_TENSOR
from ottava.numerics.tensor import QuantizationSpec, QuantizedTensor
from ottava.ops.quantize import quantize
from ottava.recipe import CELL_OF, GEMMS, RECIPES, TENSOR_OF, TENSORS, Recipe
from ottava.record.amaxes import RecordedTensor, Recording
from ottava.record.dumps import GemmDump, TensorDump, read_dump
from ottava.record.random_state import random_states_kept
from ottava.record.reader import Table
from ottava.record.schema import DUMPS, SlotKey

HIGH_PRECISION = "high precision"
_COST_OF_HIGH_PRECISION = 12.0
_COSTS = MappingProxyType({"delayed": 1.0, "guarded": 1.5, "tensor": 2.0, "row": 3.0})
_COST_OF_BLOCKS = 4.0
"""Cost of a cell, in the order of remedies: predicted scales need one pass; current scales two; rows and blocks cast x
and x.T separately and bring scales into the GEMM; a GEMM in BF16 costs most."""


@dataclass(frozen=True)
class Floor(limits.Limit):
    """A limit that a healthy cast clears."""

    of: Callable[[Expected], Array]
    """Computes the number for each row."""


def _share(part: Array, whole: Array) -> Array:
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(whole > 0, part / np.where(whole > 0, whole, 1.0), 0.0)


FLOORS = (
    Floor("underflow_pct", "%", lambda fmt: limits.PERCENT["underflow_pct"][0], above=False,
          of=lambda e: 100 * _share(e.flushed, e.elements)),
    Floor("sqnr_db", "dB", limits.warn_db, above=True, of=lambda e: np.asarray(decibels(_share(e.noise, e.signal)))),
    Floor("element_sqnr_db", "dB", limits.element_db, above=True,
          of=lambda e: np.asarray(decibels(_share(e.relative_squared, e.elements)))),
)  # fmt: skip
_IN_WORDS = MappingProxyType({"underflow_pct": "underflow", "sqnr_db": "SQNR", "element_sqnr_db": "element SQNR"})


@dataclass(frozen=True)
class Prediction:
    """The prediction for one recipe and one tensor of one layer, over all recorded steps."""

    layer: str
    tensor: str
    direction: str
    """"row", or "col" for the operand of x.T."""
    recipe: str
    spec: str
    """The cell as text, or "high precision"."""
    underflow_pct: float
    """Non-zero elements that the cast turns into 0."""
    overflow_pct: float
    """Non-zero elements that the cast clips."""
    sqnr_db: float
    """Energy-weighted; inf without error."""
    element_sqnr_db: float
    """-10 log10 of the mean of (e / x)**2: all elements weigh the same, so outliers hide nothing from it."""
    mean_relative_error: float
    steps: int
    """Recorded steps behind the numbers; 0: all numbers are unknown (NaN)."""
    clears: bool
    """Whether every step clears every floor."""
    why: str
    """The floors that fail, with their steps; or the reason why the numbers are unknown; and the assumptions."""
    cost: float
    """Cost of the cell on the ladder of remedies."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; None for unknown numbers and for an SQNR without error."""
        return dict(finite(vars(self)))


def default_recipes() -> tuple[Recipe, ...]:
    """The registered FP8 recipes: without bf16, which always clears, and narrower formats, which are guesses."""
    cells = {r: [spec for tensor in TENSORS for spec in r.cells(tensor) if spec is not None] for r in RECIPES.values()}
    return tuple(r for r, specs in cells.items() if r.quantized and all(spec.format.bits == 8 for spec in specs))


def predict(
    table: Table,
    recipes: Sequence[Recipe] | None = None,
    *,
    recording: Recording | None = None,
    amaxes: Table | None = None,
) -> list[Prediction]:
    """Predicts each recipe for each tensor of a run.

    Args:
        table: rows with histograms; "light" rows only give amaxes for predicted scales.
        recipes: None: `default_recipes`.
        recording: the amaxes of every step (`recording.read_series`), for predicted scales. None: the amaxes of the
            recorded steps only; `why` says so.
        amaxes: rows with more amaxes than `table`, for example if `table` is `thinned`.
    Returns:
        Predictions in the order of the table, then of the recipes. If the transpose of a tensor has no cast of its own,
        both directions get a prediction from the rows of x. Rows and blocks of x.T then get a worst case: each takes
        the amax of its 128x128 block, or for rows that of the tensor.

    Example:
        >>> import tempfile, torch, ottava
        >>> from ottava.measure.walk import measure
        >>> from ottava.record.reader import Run
        >>> from ottava.record.writer import RunWriter
        >>> x = torch.randn(256, 256)
        >>> x[:2] *= 1e5                                                    # massive tokens
        >>> key = SlotKey("fc2", "input", "row", "tensorwise", "E4M3", "tensor", "fp32", "current", "door")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with RunWriter(folder) as writer:
        ...         writer.tally(1, key, measure(x, ottava.quantize(x, ottava.QuantizationSpec(ottava.E4M3))))
        ...     names = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
        ...     predictions = predict(Run.open(folder).table(), [RECIPES[name] for name in names])
        >>> [(p.recipe, p.direction, p.underflow_pct > 10, p.clears) for p in predictions[:2]]
        [('tensorwise', 'row', True, False), ('rowwise', 'row', False, True)]
        >>> cheapest(predictions)      # every row of x.T (a channel) has all massive tokens in it: wgrad needs BF16
        {'fc2': 'rowwise_with_gw_hp'}
    """
    recipes = default_recipes() if recipes is None else tuple(recipes)
    scales = _Scales(table if amaxes is None else amaxes, recording)
    predictions: list[Prediction] = []
    for key, rows, assumed in progress(list(_tensors(table)), "predicting recipes"):
        gemm, side = CELL_OF[key.tensor, key.direction]
        numbers: dict[str, Expected | None] = {}
        in_blocks = rows.take(np.flatnonzero(rows.has_histograms("below_row")))
        for recipe in recipes:
            spec: QuantizationSpec | None = getattr(getattr(recipe.for_layer(key.layer), gemm), side)
            place = key.layer, key.tensor, key.direction, recipe.name
            if spec is None:
                sums = (0.0, 0.0, math.inf, math.inf, 0.0)
                predictions.append(Prediction(*place, HIGH_PRECISION, *sums, len(rows), True, "", cell_cost(None)))
                continue
            worst = _at_worst(spec) if assumed else spec
            recorded = rows if worst.granularity == PER_TENSOR else in_blocks
            if (name := str(spec.to_dict())) not in numbers:
                scale = scales.of(key, rows, spec) if spec.predicted else None
                enough = len(recorded) and (scale is not None or not spec.predicted)
                numbers[name] = expect(recorded.tallies, worst, scale=scale) if enough else None
            notes = [scales.note] if spec.predicted and scales.note else []
            notes += ["worst case: the run has no cast of x.T"] if assumed and not spec.granularity.transposes else []
            expected = numbers[name]
            predictions.append(
                _unknown(place, spec) if expected is None else judged(place, spec, recorded["step"], expected, notes)
            )
    return predictions


def thinned(table: Table, most: int) -> Table:
    """Selects rows with histograms: for each tensor `most` rows spread evenly over the run, and the rows with the
    most underflow, the most overflow and the lowest SQNR.

    Args:
        table: rows of any kind; rows without histograms are left out.
        most: rows of each tensor that are spread evenly, at least 2.
    """
    full = table.take(np.flatnonzero(table.has_histograms()))
    bad = [full.metric("underflow_pct"), full.metric("overflow_pct"), -full.metric("sqnr_db")]
    kept: set[int] = set()
    for rows in full.series().values():
        spread = np.linspace(0, len(rows) - 1, min(most, len(rows))).round().astype(int)
        kept |= {rows[i] for i in spread}
        kept |= {rows[int(np.argmax(np.nan_to_num(column[rows], nan=-np.inf)))] for column in bad}
    return full.take(np.array(sorted(kept), dtype=np.int64))


def cheapest(predictions: Iterable[Prediction]) -> dict[str, str | None]:
    """For each layer the cheapest predicted recipe that clears every floor in all tensors; None if none does.

    Of two equally cheap recipes it takes the first.
    """
    layers: dict[str, dict[str, list[Prediction]]] = {}
    for cell in predictions:
        layers.setdefault(cell.layer, {}).setdefault(cell.recipe, []).append(cell)
    return {
        layer: min(
            (name for name, cells in recipes.items() if all(cell.clears for cell in cells)),
            key=lambda name: sum(cell.cost for cell in recipes[name]),
            default=None,
        )
        for layer, recipes in layers.items()
    }


def cell_cost(spec: QuantizationSpec | None) -> float:
    """The cost of a cell on the ladder of remedies.

    Example:
        >>> cell_cost(RECIPES["delayed"].fprop.lhs) < cell_cost(RECIPES["blockwise"].fprop.lhs) < cell_cost(None)
        True
    """
    if spec is None:
        return _COST_OF_HIGH_PRECISION
    return _COSTS.get(spec.scaling if spec.predicted else str(spec.granularity), _COST_OF_BLOCKS)


_SHOWN = ("underflow_pct", "overflow_pct", "sqnr_db", "element_sqnr_db")


def summary(predictions: Sequence[Prediction]) -> list[dict[str, Any]]:
    """One row per recipe, cheapest first: the layers that it clears, and its worst tensor with its numbers."""
    recipes = grouped((cell.recipe, cell) for cell in predictions)
    rows = []
    for name, cells in recipes.items():
        layers: dict[str, bool] = {}
        for cell in cells:
            layers[cell.layer] = layers.get(cell.layer, True) and cell.clears
        quantized = [cell for cell in cells if cell.steps and cell.spec != HIGH_PRECISION]
        worst = min(quantized, key=lambda cell: cell.element_sqnr_db, default=None)
        rows.append(
            {
                "recipe": name,
                "clears": sum(layers.values()),
                "layers": len(layers),
                "cost": sum(cell.cost for cell in cells) / len(cells),
                "worst": f"{worst.layer} {SYMBOLS[worst.tensor]}" if worst else None,
                **{number: getattr(worst, number, None) for number in _SHOWN},
            }
        )
    return sorted(rows, key=lambda row: row["cost"])


def _at_worst(spec: QuantizationSpec) -> QuantizationSpec:
    """The spec for x.T if the run recorded only x: larger blocks that contain those of x.T and are blocks of x."""
    granularity = spec.granularity
    if granularity.transposes or granularity.rows != 1:
        return spec
    larger = PER_TENSOR if granularity.cols is None or granularity.cols > 128 else BLOCK_128X128
    return replace(spec, granularity=larger)


def _tensors(table: Table) -> Iterator[tuple[SlotKey, Table, bool]]:
    """Each tensor and direction that a recipe casts, with its rows with histograms, and whether these are rows of the
    other direction."""
    seen: dict[tuple[str, str], dict[str, tuple[SlotKey, Table]]] = {}
    for key, rows in table.take(np.flatnonzero(table.has_histograms())).groups():
        if (key.tensor, key.direction) in CELL_OF and not only_simulated(key.layer, key.source):
            seen.setdefault((key.layer, key.tensor), {}).setdefault(key.direction, (key, rows))
    for directions in seen.values():
        for direction in ("row", "col"):
            other = next(iter(directions.values()))
            key, rows = directions.get(direction, other)
            yield key._replace(direction=direction), rows, direction not in directions


class _Scales:
    """The predicted scales in the steps of a table."""

    def __init__(self, table: Table, recording: Recording | None) -> None:
        self._recording = recording if recording is not None else _recording(table)
        self.note = "" if recording is not None else "amaxes of the recorded steps only"
        self._columns = {(t.layer, t.tensor): i for i, t in enumerate(self._recording.tensors)}
        self._steps = {step: i for i, step in enumerate(self._recording.steps)}
        self._known: dict[QuantizationSpec, Array] = {}

    def of(self, key: SlotKey, rows: Table, spec: QuantizationSpec) -> Array | None:
        """(rows,); None if the recording lacks the tensor, or the algorithm is a function."""
        column = self._columns.get((key.layer, key.tensor))
        if column is None or callable(spec.amax_compute_algo):
            return None
        if spec not in self._known:
            tensors = [RecordedTensor.of(t.layer, t.tensor, spec) for t in self._recording.tensors]
            setting = tensors[0].setting
            assert setting is not None  # only a function has no setting
            recording = Recording(tuple(tensors), self._recording.steps, self._recording.amax)
            self._known[spec] = predict_scales(recording, setting).numpy().astype(np.float64)
        amax = np.asarray(rows.tallies.amax, dtype=np.float64)
        current = current_scale(amax, spec)
        index = np.array([self._steps.get(int(step), -1) for step in rows["step"]])
        predicted = np.where(index >= 0, self._known[spec][index, column], 0.0)
        if spec.scaling == "guarded":
            top = amax * predicted
            outside = (top > spec.format.max) | (top < math.ldexp(spec.format.max, -spec.guard_bits))
            predicted = np.where(outside, current, predicted)
        return np.where(predicted > 0, predicted, current)


def _recording(table: Table) -> Recording:
    pairs = list(zip(table["layer"], table["tensor"], strict=True))
    columns = {pair: i for i, pair in enumerate(dict.fromkeys(pairs))}
    steps, rows = np.unique(table["step"], return_inverse=True)
    amaxes = np.zeros((len(steps), len(columns)), dtype=np.float32)
    cells: Any = rows, [columns[pair] for pair in pairs]
    np.fmax.at(amaxes, cells, np.asarray(table.tallies.amax, dtype=np.float32))
    spec = RECIPES["delayed"].fprop.lhs
    assert spec is not None
    named = tuple(RecordedTensor.of(layer, tensor, spec) for layer, tensor in columns)
    return Recording(named, tuple(steps.tolist()), torch.from_numpy(amaxes))


def _unknown(place: tuple[str, str, str, str], spec: QuantizationSpec) -> Prediction:
    why = f'the run has no histograms for {spec}; watch with detail="blocks"'
    if spec.transform is not None or spec.block_scale != "amax":
        why = f"no histogram says what {spec} would do, and no whole tensor was dumped; watch with dump.rows=0"
    numbers = (math.nan,) * 5
    return Prediction(*place, str(spec), *numbers, 0, clears=False, why=why, cost=cell_cost(spec))


def judged(
    place: tuple[str, str, str, str], spec: QuantizationSpec, steps: Array, expected: Expected, notes: list[str]
) -> Prediction:
    """The prediction of one cell from the sums of each step; notes: what the numbers stand on."""
    whole = Expected(*(np.asarray([column.sum()]) for column in vars(expected).values()))
    failures = []
    for floor in FLOORS:
        values = floor.of(expected)
        failed = np.flatnonzero(floor.fails(values, spec.format))
        if len(failed):
            worst = int(failed[np.argmin(values[failed]) if floor.above else np.argmax(values[failed])])
            side, unit = "below" if floor.above else "above", floor.unit
            found = f"{_IN_WORDS[floor.metric]} of {values[worst]:.1f} {unit} at step {int(steps[worst])}"
            failures.append(f"{found}, {side} {floor.limit(spec.format):g} {unit}")
    judged_by: dict[str, Any] = {floor.metric: float(floor.of(whole)[0]) for floor in FLOORS}
    return Prediction(
        *place,
        str(spec),
        **judged_by,
        overflow_pct=float(100 * _share(whole.clipped, whole.elements)[0]),
        mean_relative_error=float(_share(whole.relative, whole.elements)[0]),
        steps=len(steps),
        clears=not failures,
        why="; ".join([*failures, *notes]),
        cost=cell_cost(spec),
    )


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
    used = x.isfinite() & (x != 0)
    scale_inv = x_q.spec.granularity.expand(x_q.scale_inv, (x.shape[0], x.shape[1])).double()
    clipped = x_q.spec.format.clips(x.abs(), scale_inv) & used
    exact, near = x[used], x_q.dequantize(torch.float32).double()[used]
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
