"""Sees the casts of ottava layers: the very operands that the GEMMs get, at the door where they are made.

Hooks are torch's global ones, attached while a step is watched: layers converted later are seen, and a watched weight
keeps its cache (a hook of its own would switch it off).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ottava.debug.observer import casts_of
from ottava.debug.watch.collector import Collector
from ottava.debug.watch.hooks import GlobalHooks
from ottava.debug.watch.operands import repeats_a_forward, unobserved
from ottava.quantized_layer import QuantizedLayer
from ottava.quantized_tensor import QuantizedTensor
from ottava.quantizer import Doors, Quantizer

_GRADIENTS = frozenset({"grad_output", "do", "dp", "dqkv"})
OnOperands = Callable[[str, str, Quantizer, Tensor, Any, Any], None]
"""(layer, tensor, door, x, operand of x, operand of x.T): for checks of what must agree."""


class DoorTap:
    """Hands every cast of ottava layers to a collector.

    Args:
        collector: gets them.
        model: only its layers; None for all of the process.
        on_operands: called with every pair of operands in a step that is looked at.
    """

    def __init__(
        self, collector: Collector, model: nn.Module | None = None, on_operands: OnOperands | None = None
    ) -> None:
        self.collector, self.on_operands = collector, on_operands
        self.layers: dict[str, weakref.ref[nn.Module]] = {}
        """Layers whose doors were found, by full name."""
        self.seen: set[str] = set()
        """Those that cast something while it was watched."""
        self._model = None if model is None else weakref.ref(model)
        self._places: weakref.WeakKeyDictionary[nn.Module, tuple[str, str]] = weakref.WeakKeyDictionary()
        self._hooks = GlobalHooks(self._before, self._after)
        if model is not None:
            self.find(model)

    def find(self, model: nn.Module) -> None:
        """Takes in the layers of a model."""
        for name, module in model.named_modules():
            self._adopt(module, name)

    def expected(self) -> dict[str, weakref.ref[nn.Module]]:
        """Layers that should have been seen: attention that is in high precision has doors, and casts nothing."""
        return {
            name: ref
            for name, ref in self.layers.items()
            if name in self.seen or ref() is None or isinstance(ref(), QuantizedLayer)
        }

    def attach(self) -> None:
        """From now on casts are seen."""
        self._hooks.attach()

    def detach(self) -> None:
        """No more."""
        self._hooks.detach()

    def _adopt(self, module: nn.Module, name: str = "") -> None:
        if not isinstance(doors := getattr(module, "quantizers", None), Doors):
            return
        layer = getattr(module, "name", "") or name or f"{type(module).__name__} {len(self.layers)}"
        known = self.layers.get(layer)
        if known is not None and known() not in (None, module):
            layer = f"{layer} ({len(self.layers)})"  # of another model
        self.layers[layer] = weakref.ref(module)
        for tensor, door in doors.named_children():
            self._places[door] = (layer, tensor)

    def _before(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():  # first, and so in _after: Dynamo traces global hooks
            return
        doors = getattr(module, "quantizers", None) if self._model is None else None
        if isinstance(doors, Doors) and next(doors.children()) not in self._places:
            self._adopt(module)

    def _after(self, door: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if not isinstance(door, Quantizer) or (place := self._place(door)) is None:
            return
        layer, tensor = place
        if not self._counts(door, tensor, kwargs.get("record", True)):
            return
        self.seen.add(layer)
        wanted = self.collector.wants(layer, tensor)
        # the weight is summed once a step, and checked in every micro-batch: it is later ones that a stale cache serves
        checked = self.collector.looking and self.collector.config.watches(layer, tensor)
        if not wanted and not checked:
            return
        with unobserved(args[0]):  # no graph, no autocast, no dispatch mode: selective checkpointing counts operations
            if wanted:
                self._take(layer, tensor, *args[:3], *output)
            if checked and self.on_operands is not None:
                with self.collector.timed():
                    self.on_operands(layer, tensor, door, args[0], *output)

    def _take(self, layer: str, tensor: str, x: Tensor, row_spec: Any, col_spec: Any, row: Any, col: Any) -> None:
        recipe = self._recipe(layer)
        if (
            row is None
            and isinstance(col, QuantizedTensor)
            and row_spec == col_spec
            and col_spec.granularity.transposes
        ):
            row, col = col.t(), None  # one cast serves both, whichever GEMM asks for it
        extent = None
        for direction, of, x_q in casts_of(x, row, col):
            extent = self.collector.cast(layer, tensor, direction, of, x_q, source="door", recipe=recipe, extent=extent)
        self.collector.finished(layer, tensor)

    def _place(self, door: Quantizer) -> tuple[str, str] | None:
        place = self._places.get(door)
        if place is None and self._model is not None and (model := self._model()) is not None:
            self.find(model)  # converted since
            place = self._places.setdefault(door, ("", ""))  # of another model
        return place if place and place[1] else None

    def _recipe(self, layer: str) -> str:
        module: Any = self.layers[layer]()
        call = getattr(module, "last_call", None)
        return str(call.recipe.name if call is not None else module.resolved.name)

    def _counts(self, door: Quantizer, tensor: str, record: bool) -> bool:
        """Whether this cast belongs to training and is no repetition: recomputation runs a forward again."""
        if tensor in _GRADIENTS:
            return True
        return record and not (torch._C._current_graph_task_id() != -1 and repeats_a_forward())
