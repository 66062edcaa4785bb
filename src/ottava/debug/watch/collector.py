"""Sums what the taps see in one optimizer step: full tallies where the step is looked at, amaxes in every step.

On a GPU nothing here waits for the device while the step runs, but for histograms in a full look; numbers are read back
when it has ended.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from ottava.debug.measure import Packed, cast_of, found_by, measure_all, survey
from ottava.debug.run.schema import SlotKey, cast_key
from ottava.debug.sample import sampled, take_bands, take_bands_of
from ottava.debug.tally import Tallies, unpack
from ottava.debug.watch.config import WatchConfig
from ottava.debug.watch.dump_plan import DumpPlan
from ottava.kernels.native.measure import Look
from ottava.quantized_tensor import QuantizationSpec, QuantizedTensor
from ottava.recipe import TENSORS, Recipe, get_recipe

_SMALL_BYTES = 2**20
"""Of a tensor that is rather copied than measured on its own."""
_WAITING_BYTES = 64 * 2**20
"""Of samples that are kept until the step has ended."""

Place = tuple[str, str]
"""(layer, tensor)."""


class Light(NamedTuple):
    """What is known of every tensor of a step without a full look: n of them."""

    keys: tuple[SlotKey, ...]
    amax: Tensor
    """fp32 (n,): inf or NaN where an element was."""
    scale_inv: Tensor
    """fp32 (n,): of the cast, where it has one scale; else NaN."""


_CAST_AS = MappingProxyType(
    {"output": ("input", "row"), "grad_input": ("grad_output", "row"), "grad_weight": ("grad_output", "col")}
)
"""What this layer does not cast is measured as the next one would cast it."""


class Collector:
    """What was seen since the last `drain`.

    Args:
        config: what is watched.
        dumps: which casts are written out as they are.
    """

    def __init__(self, config: WatchConfig, dumps: DumpPlan | None = None) -> None:
        self.config = config
        self.dumps = dumps
        self.looking = False
        """Whether the running step is looked at in full."""
        self.look = 0
        """Number of the look; decides which rows are sampled."""
        self.noting = config.light
        """Whether amaxes of the running step are noted."""
        self.seconds = 0.0
        """Time spent on watching, on the host."""
        self._timing = False
        self._recipes = tuple(get_recipe(recipe) for recipe in config.recipes)
        self._waiting: list[tuple[SlotKey, Look]] = []
        self._waiting_bytes = 0
        self._sums: dict[SlotKey, Packed] = {}
        self._light: dict[Place, tuple[SlotKey, Tensor, Tensor | None]] = {}
        self._once: set[Place] = set()
        self._cells: dict[Place, list[tuple[SlotKey, QuantizationSpec]]] = {}
        self._reach = max((spec.amax_history_len for _, _, spec in self._predicted()), default=0)
        self._history: dict[Place, deque[Tensor]] = {}

    @property
    def holds(self) -> bool:
        """Whether anything was handed in since the last `drain`."""
        return bool(self._light or self._waiting or self._sums)

    def wants(self, layer: str, tensor: str) -> bool:
        """Whether that tensor is to be handed in; the weight only once a step, whatever the micro-batches."""
        if not self.config.watches(layer, tensor) or (layer, tensor) in self._once:
            return False
        # weights move slowly: between looks their amax is worth its price only where a scale is predicted from it
        return self.looking or (self.noting and (tensor != "weight" or self._reach > 0))

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
        """Takes in a cast that was made: x (R, C), and its codes.

        Returns:
            The extent of x, if it was asked for; that of x.T is the same: hand it in with the cast of that.
        """
        with self.timed():
            key = cast_key(layer, tensor, direction, recipe, x_q.spec, source)
            first = direction == "row" or (layer, tensor) not in self._light
            if not x.numel() or not (self.looking or first):
                return None
            if extent is None and tensor != "weight":  # whose cast is one of an earlier weight, if a cache is stale
                extent = found_by(x_q, x.numel())
            extent = survey(x.detach(), finite=self.looking) if extent is None else extent
            if first:
                self._note(key, extent, x_q.scale_inv)
            if self.looking:
                self._look(key, x, x_q, extent)
                if self.dumps is not None and self.dumps.wants(key):
                    self.dumps.take(key, x, x_q)
            return extent

    def simulate(self, layer: str, tensor: str, x: Tensor, dtype: torch.dtype | None = None) -> None:
        """Casts x (R, C) as the configured recipes would, and takes that in.

        Args:
            dtype: what x becomes before its cast; None: it stays what it is.
        """
        with self.timed():
            casts = self._cells_of(layer, tensor)
            if not casts or not x.numel():
                return
            self.finished(layer, tensor)
            x = x.detach()
            extent = survey(x, dtype, finite=self.looking)
            self._note(casts[0][0], extent, None)
            if not self.looking:
                return
            for key, spec in casts:
                matrix = x if key.direction == "row" else x.t()
                scale = self._predicted_scale((layer, tensor), spec) if spec.predicted else None
                self._look(key, matrix, spec, extent, scale, dtype)
                if self.dumps is not None and self.dumps.wants(key):
                    matrix = matrix.to(dtype or x.dtype)
                    self.dumps.take(key, matrix, cast_of(Look(matrix, spec, extent, scale)))

    def finished(self, layer: str, tensor: str) -> None:
        """A tap has handed in all casts of a tensor; a weight is the same in every micro-batch of a step."""
        if tensor == "weight":
            self._once.add((layer, tensor))

    def drain(self) -> tuple[Tallies[SlotKey], Light]:
        """What was seen in the step that ended. Reads the tallies back, if there are any."""
        with self.timed():
            self._measure()
            noted = self._light
            for place, (_, extent, _) in noted.items() if self._reach else ():
                self._history.setdefault(place, deque(maxlen=self._reach)).appendleft(extent[0].to(torch.float32))
            seen = _tallies(self._sums)
            self._sums, self._light, self._once = {}, {}, set()
            return seen, _light(list(noted.values()))

    def _note(self, key: SlotKey, extent: Tensor, scale_inv: Tensor | None) -> None:
        place = (key.layer, key.tensor)
        if not (self.config.light and (self.noting or self.looking)):
            return
        scale = None if scale_inv is None or scale_inv.numel() != 1 else scale_inv.reshape(())
        if (earlier := self._light.get(place)) is not None:
            extent = torch.maximum(earlier[1], extent)
        self._light[place] = (key, extent, scale)

    def _look(
        self,
        key: SlotKey,
        x: Tensor,
        cast: QuantizedTensor | QuantizationSpec,
        extent: Tensor,
        scale: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Measures a cast: a copy of a few rows when the step has ended, all together; many rows at once."""
        look = Look(x, cast, extent, scale)
        blocks = self.config.detail == "blocks"
        part = sampled(look, self.config.sample, self.look, dtype, blocks=blocks)
        if part is None and x.nbytes <= _SMALL_BYTES:
            whole = [range(x.shape[0])]
            part = look._replace(x=take_bands(x, whole, dtype))
            if isinstance(cast, QuantizedTensor):
                part = part._replace(cast=take_bands_of(cast, whole))
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
        """From the amaxes of the steps before; None: the current one, where there were none."""
        history = list(self._history.get(place, ()))[: spec.amax_history_len]
        if not history:
            return None
        return spec.from_window(torch.stack(history))[0].reshape(1, 1)

    def _cells_of(self, layer: str, tensor: str) -> list[tuple[SlotKey, QuantizationSpec]]:
        key = (layer, tensor)
        if key not in self._cells:
            self._cells[key] = [
                (cast_key(layer, tensor, direction, recipe.name, spec, "hook"), spec)
                for recipe in self._recipes
                for direction, spec in cells(recipe.for_layer(layer), tensor)
            ]
        return self._cells[key]

    def _predicted(self) -> Iterator[tuple[Recipe, str, QuantizationSpec]]:
        for recipe in self._recipes:
            for tensor in (*TENSORS, *_CAST_AS):
                yield from ((recipe, d, spec) for d, spec in cells(recipe, tensor) if spec.predicted)

    @contextmanager
    def timed(self) -> Iterator[None]:
        """What runs inside is counted as time spent on watching."""
        if self._timing:  # inside another one
            yield
            return
        self._timing, started = True, time.perf_counter()
        try:
            yield
        finally:
            self._timing = False
            self.seconds += time.perf_counter() - started


def cells(recipe: Recipe, tensor: str) -> list[tuple[str, QuantizationSpec]]:
    """The casts that a resolved recipe makes of a tensor: ("row", spec) of x, ("col", spec) of x.T where one cast does
    not serve both.

    Example:
        >>> [(d, str(spec)) for d, spec in cells(get_recipe("blockwise"), "input")]
        [('row', 'E4M3[1x128, pow2]'), ('col', 'E4M3[1x128, pow2]')]
    """
    like, direction = _CAST_AS.get(tensor, (tensor, ""))
    row, col = recipe.cells(like)
    if direction:
        row, col = (row if direction == "row" else col), None
    found = [("row", row)] if row is not None else []
    shared = col is not None and row == col and col.granularity.transposes
    return found if col is None or shared else [*found, ("col", col)]


def _tallies(sums: Mapping[SlotKey, Packed]) -> Tallies[SlotKey]:
    if not sums:
        return Tallies.of({})
    numbers, extremes = (torch.stack(parts).cpu().numpy() for parts in zip(*sums.values(), strict=True))
    return Tallies(sums, unpack(numbers, extremes))


def _light(noted: list[tuple[SlotKey, Tensor, Tensor | None]]) -> Light:
    if not noted:
        return Light((), torch.empty(0), torch.empty(0))
    unknown = torch.full((), math.nan, device=noted[0][1].device)
    amax = torch.stack([extent.to(unknown.device) for _, extent, _ in noted])[:, 0].to(torch.float32)
    if all(scale is None for _, _, scale in noted):
        return Light(tuple(key for key, _, _ in noted), amax, unknown.expand(len(noted)))
    scale_inv = torch.stack([unknown if scale is None else scale.to(unknown.device) for _, _, scale in noted])
    return Light(tuple(key for key, _, _ in noted), amax, scale_inv)
