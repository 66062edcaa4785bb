"""Collects the casts of one optimizer step from the taps: tallies in a step with a full look, amaxes in every step.

On a GPU only the histograms of a full look wait for the device while the step runs. The host reads all other numbers
after the step.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from ottava.kernels.native.measure import Look
from ottava.measure.layer_names import matches
from ottava.measure.sample import sampled, take_bands, take_bands_of
from ottava.measure.statistics import STATISTICS
from ottava.measure.tally import Tallies, Tally, unpack
from ottava.measure.walk import Packed, cast_of, found_by, measure_all, survey
from ottava.numerics.tensor import QuantizationSpec, QuantizedTensor
from ottava.recipe import TENSORS, Recipe, get_recipe
from ottava.record.dumps import Dumper
from ottava.record.schema import SlotKey, cast_key
from ottava.record.writer import RunWriter
from ottava.watching.config import DumpConfig, Period, WatchConfig

_SMALL_BYTES = 2**20
"""The collector copies tensors up to this size, to measure them together after the step."""
_WAITING_BYTES = 64 * 2**20
"""Largest size of all copies that wait for the end of the step."""

Place = tuple[str, str]
"""(layer, tensor)."""


class Light(NamedTuple):
    """Amaxes and scales of the n tensors of a step."""

    keys: tuple[SlotKey, ...]
    amax: Tensor
    """fp32 (n,): inf or NaN if an element was."""
    scale_inv: Tensor
    """fp32 (n,): the cast's scale_inv; NaN if it has several scales."""


_CAST_AS = MappingProxyType(
    {"output": ("input", "row"), "grad_input": ("grad_output", "row"), "grad_weight": ("grad_output", "col")}
)
"""Tensors that this layer does not cast -> the tensor and direction as which the next layer casts them."""


_HEALTH = "row_sqnr_p50_db"


class DumpPlan:
    """Chooses casts and passes them to a `Dumper`.

    Args:
        config: settings of dumps.
        writer: the run's writer.
    """

    def __init__(self, config: DumpConfig, writer: RunWriter) -> None:
        self.config = config
        self._dumper = Dumper(writer, int(config.quota_gb * 2**30), config.rows)
        self._step = 0
        self._periods: list[Period] = []
        self._health: dict[SlotKey, float] = {}
        self._suspects: set[SlotKey] = set()

    def begin(self, step: int) -> bool:
        """Begins a step; True if a cast of it will be written, so that it needs a full look."""
        self._step = step
        self._periods = [period for period in self.config.periods if period.chooses(step)]
        return step in self.config.steps or bool(self._suspects or self._periods)

    def wants(self, key: SlotKey) -> bool:
        """Whether to write this cast of the running step."""
        if key in self._suspects or any(period.has(key.layer, key.tensor) for period in self._periods):
            return True
        scheduled = self._step in self.config.steps and key.tensor in self.config.tensors
        return scheduled and matches(key.layer, self.config.layers or ("*",))

    def take(self, key: SlotKey, x: Tensor, x_q: QuantizedTensor) -> None:
        """Writes a cast: all of x (R, C) before it, and x_q; once a step, in the first micro-batch."""
        self._suspects.discard(key)
        self._dumper.dump(self._step, key, x.detach(), x_q)

    def looked(self, tallies: Mapping[SlotKey, Tally]) -> None:
        """Adds the tallies of a full look."""
        if tallies:
            values = STATISTICS[_HEALTH].finish(Tallies.of(tallies).rows)
            self._health |= dict(zip(tallies, values.tolist(), strict=True))

    def triggered(self) -> None:
        """Marks the casts with the lowest row SQNR; the next look writes them."""
        ranked = sorted((value, key) for key, value in self._health.items() if value == value)
        self._suspects |= {key for _, key in ranked[: self.config.on_trigger]}


class Collector:
    """Collects casts until `drain`.

    Args:
        config: settings of the watch.
        dumps: chooses the casts to write to files.
        recipe_of: the recipe that a layer of another package casts by itself; None if it does not.
    """

    def __init__(
        self,
        config: WatchConfig,
        dumps: DumpPlan | None = None,
        recipe_of: Callable[[str], Recipe | None] = lambda layer: None,
    ) -> None:
        self.config, self._recipe_of = config, recipe_of
        self.dumps = dumps
        self.looking = False
        """Whether the running step gets a full look."""
        self.only: Sequence[Period] | None = None
        """The periods whose tensors the look is for; None: all tensors."""
        self.look = 0
        """Number of the look; decides which rows are in the sample."""
        self.noting = config.light
        """Whether the running step notes amaxes."""
        self._recipes = tuple(get_recipe(recipe) for recipe in config.recipes)
        self._waiting: list[tuple[SlotKey, Look]] = []
        self._waiting_bytes = 0
        self._sums: dict[SlotKey, Packed] = {}
        self._light: dict[Place, tuple[SlotKey, Tensor, Tensor | None]] = {}
        self._once: set[Place] = set()
        self._cells: dict[Place, list[tuple[SlotKey, QuantizationSpec]]] = {}
        self._reach = max((spec.amax_history_len for spec in predicted(self._recipes)), default=0)
        self._history: dict[Place, deque[Tensor]] = {}

    @property
    def holds(self) -> bool:
        """Whether any cast arrived since the last `drain`."""
        return bool(self._light or self._waiting or self._sums)

    def wants(self, layer: str, tensor: str) -> bool:
        """Whether a tap should pass this tensor on: a weight once a step, all others in every micro-batch."""
        if not self.config.watches(layer, tensor) or (layer, tensor) in self._once:
            return False
        # weights change slowly: between looks, note their amax only if it predicts a scale
        return self._looks_at(layer, tensor) or (self.noting and (tensor != "weight" or self._reach > 0))

    def _looks_at(self, layer: str, tensor: str) -> bool:
        return self.looking and (self.only is None or any(period.has(layer, tensor) for period in self.only))

    def cast(
        self,
        layer: str,
        tensor: str,
        direction: str,
        x: Tensor,
        x_q: QuantizedTensor,
        *,
        source: str,
        recipe: str,
        extent: Tensor | None = None,
    ) -> Tensor | None:
        """Adds a cast: x (R, C) and its codes.

        Returns:
            The extent of x, if it was needed. Pass it on with the cast of x.T, which has the same extent.
        """
        key = cast_key(layer, tensor, direction, recipe, x_q.spec, source)
        first = direction == "row" or (layer, tensor) not in self._light
        if not x.numel() or not (self.looking or first):
            return None
        if extent is None and tensor != "weight":  # a stale cache may hold the cast of an earlier weight
            extent = found_by(x_q, x.numel())
        extent = survey(x.detach(), finite=self.looking) if extent is None else extent
        if first:
            self._note(key, extent, x_q.scale_inv)
        if self._looks_at(layer, tensor):
            self._look(key, Look(x, x_q, extent))
            if self.dumps is not None and self.dumps.wants(key):
                self.dumps.take(key, x, x_q)
        return extent

    def simulate(self, layer: str, tensor: str, x: Tensor, dtype: torch.dtype | None = None) -> None:
        """Casts x (R, C) as the layer's own package does, or else as the recipes of the settings would.

        Args:
            dtype: dtype of x before the cast; None: its own.
        """
        casts = self._cells_of(layer, tensor)
        if not casts or not x.numel():
            return
        self.finished(layer, tensor)
        x = x.detach()
        extent = survey(x, dtype, finite=self.looking)
        self._note(casts[0][0], extent, None)
        if not self._looks_at(layer, tensor):
            return
        for key, spec in casts:
            matrix = x if key.direction == "row" else x.t()
            scale = self._predicted_scale((layer, tensor), spec) if spec.predicted else None
            cast: QuantizedTensor | QuantizationSpec = spec
            if spec.transform is not None:  # whole columns and groups are needed, so no sample can be cast later
                matrix = matrix.to(dtype or x.dtype)
                cast = cast_of(Look(matrix, spec, extent))
                matrix = cast.transformed(matrix)
                self._look(key, Look(matrix, cast, survey(matrix)))
            else:
                self._look(key, Look(matrix, spec, extent, scale), dtype)
            if self.dumps is not None and self.dumps.wants(key):
                matrix = matrix if cast is not spec else matrix.to(dtype or x.dtype)
                self.dumps.take(key, matrix, cast_of(Look(matrix, cast, extent, scale)))

    def finished(self, layer: str, tensor: str) -> None:
        """Ends the casts of a tensor. A weight is the same in every micro-batch, so a step needs it once."""
        if tensor == "weight":
            self._once.add((layer, tensor))

    def drain(self) -> tuple[Tallies[SlotKey], Light]:
        """The tallies and amaxes of the step that ended. Tallies are read from the device."""
        self._measure()
        noted = self._light
        for place, (_, extent, _) in noted.items() if self._reach else ():
            self._history.setdefault(place, deque(maxlen=self._reach)).appendleft(extent[0].to(torch.float32))
        tallies = _tallies(self._sums)
        self._sums, self._light, self._once = {}, {}, set()
        return tallies, _light(list(noted.values()))

    def _note(self, key: SlotKey, extent: Tensor, scale_inv: Tensor | None) -> None:
        place = (key.layer, key.tensor)
        if not (self.config.light and (self.noting or self.looking)):
            return
        scale = None if scale_inv is None or scale_inv.numel() != 1 else scale_inv.reshape(())
        if (earlier := self._light.get(place)) is not None:
            extent = torch.maximum(earlier[1], extent)
        self._light[place] = (key, extent, scale)

    def _look(self, key: SlotKey, look: Look, dtype: torch.dtype | None = None) -> None:
        """Measures a large cast now. Of others it copies a sample, and measures all copies together after the step."""
        x, detail = look.x, self.config.detail
        blocks, complete = detail in ("blocks", "anatomy"), detail == "anatomy"
        part = sampled(look, self.config.sample, self.look, dtype, blocks=blocks, complete=complete)
        if part is None and x.nbytes <= _SMALL_BYTES:
            whole = [range(x.shape[0])]
            part = look._replace(x=take_bands(x, whole, dtype))
            if isinstance(look.cast, QuantizedTensor):
                part = part._replace(cast=take_bands_of(look.cast, whole))
        self._waiting.append((key, look._replace(x=x if dtype is None else x.to(dtype)) if part is None else part))
        self._waiting_bytes += self._waiting[-1][1].x.nbytes
        if part is None or x.device.type != "cpu" or self._waiting_bytes > _WAITING_BYTES:
            self._measure()

    def _measure(self) -> None:
        waiting, self._waiting, self._waiting_bytes = self._waiting, [], 0
        if not waiting:
            return
        measured = measure_all([look for _, look in waiting], detail=self.config.detail)
        for i, (key, _) in enumerate(waiting):
            new = Packed(measured.sums[i], measured.extremes[i])
            if (old := self._sums.get(key)) is None:
                self._sums[key] = new
            else:
                old.sums.add_(new.sums)
                torch.maximum(old.extremes, new.extremes, out=old.extremes)

    def _predicted_scale(self, place: Place, spec: QuantizationSpec) -> Tensor | None:
        """The scale predicted from earlier amaxes; None without any: the cast then takes the current scale."""
        history = list(self._history.get(place, ()))[: spec.amax_history_len]
        if not history:
            return None
        return spec.from_window(torch.stack(history))[0].reshape(1, 1)

    def _cells_of(self, layer: str, tensor: str) -> list[tuple[SlotKey, QuantizationSpec]]:
        key = (layer, tensor)
        if key not in self._cells:
            own = self._recipe_of(layer)
            recipes, source = (self._recipes, "hook") if own is None else ((own,), "config")
            self._reach = max(self._reach, *(spec.amax_history_len for spec in predicted(recipes)), 0)
            self._cells[key] = [
                (cast_key(layer, tensor, direction, recipe.name, spec, source), spec)
                for recipe in recipes
                for direction, spec in cells(recipe.for_layer(layer), tensor)
            ]
        return self._cells[key]


def cells(recipe: Recipe, tensor: str) -> list[tuple[str, QuantizationSpec]]:
    """The casts of a tensor under a resolved recipe: ("row", spec) of x, and ("col", spec) of x.T unless one cast
    serves both.

    Example:
        >>> [(d, str(spec)) for d, spec in cells(get_recipe("blockwise"), "input")]
        [('row', 'E4M3[1x128, pow2]'), ('col', 'E4M3[1x128, pow2]')]
    """
    like, direction = _CAST_AS.get(tensor, (tensor, ""))
    row, col = recipe.cells(like)
    if direction:
        row, col = (row if direction == "row" else col), None
    casts = [("row", row)] if row is not None else []
    shared = col is not None and row == col and col.granularity.transposes
    return casts if col is None or shared else [*casts, ("col", col)]


def predicted(recipes: Sequence[Recipe]) -> Iterator[QuantizationSpec]:
    """The cells of recipes that predict their scales."""
    for recipe in recipes:
        for tensor in (*TENSORS, *_CAST_AS):
            yield from (spec for _, spec in cells(recipe, tensor) if spec.predicted)


def _tallies(sums: Mapping[SlotKey, Packed]) -> Tallies[SlotKey]:
    if not sums:
        return Tallies.of({})
    numbers, extremes = (torch.stack(parts).cpu().numpy() for parts in zip(*sums.values(), strict=True))
    return Tallies(sums, unpack(numbers, extremes))


def _light(noted: list[tuple[SlotKey, Tensor, Tensor | None]]) -> Light:
    if not noted:
        return Light((), *torch.empty(2, 0, dtype=torch.float32))
    unknown = torch.full((), math.nan, dtype=torch.float32, device=noted[0][1].device)
    amax = torch.stack([extent.to(unknown.device) for _, extent, _ in noted])[:, 0].to(torch.float32)
    if all(scale is None for _, _, scale in noted):
        return Light(tuple(key for key, _, _ in noted), amax, unknown.expand(len(noted)))
    scale_inv = torch.stack([unknown if scale is None else scale.to(unknown.device) for _, _, scale in noted])
    return Light(tuple(key for key, _, _ in noted), amax, scale_inv)
