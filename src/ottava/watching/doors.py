"""Watches the casts of ottava layers at their doors, where the operands of the GEMMs are made.

It uses torch's global hooks, attached only in watched steps. So it sees layers that are converted later, and a weight
keeps its cache, which a hook on the door would switch off.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from ottava.engine.layer import QuantizedLayer
from ottava.engine.quantizer import Doors, Quantizer
from ottava.measure.observer import casts_of, in_numbers
from ottava.numerics.tensor import QuantizedTensor
from ottava.watching.collector import Collector
from ottava.watching.operands import GlobalHooks, repeats_a_forward, unobserved

_GRADIENTS = frozenset({"grad_output", "do", "dp", "dqkv"})
OnOperands = Callable[[str, str, Quantizer, Tensor, Any, Any], None]
"""Called with (layer, tensor, door, x, operand of x, operand of x.T), to check that they agree."""


class DoorTap:
    """Passes every cast of ottava layers to a collector.

    Args:
        collector: gets the casts.
        model: the only model to watch; None: every model of the process.
        on_operands: called with every pair of operands in a step with a full look.
        on_layer: called with the name of each layer that is found, and the layer.
    """

    def __init__(
        self,
        collector: Collector,
        model: nn.Module | None = None,
        on_operands: OnOperands | None = None,
        on_layer: Callable[[str, nn.Module], object] | None = None,
    ) -> None:
        self.collector, self.on_operands, self.on_layer = collector, on_operands, on_layer
        self.layers: dict[str, weakref.ref[nn.Module]] = {}
        """Full name -> layer with doors."""
        self.seen: set[str] = set()
        """Names of layers that made a cast in a watched step."""
        self.dtypes: dict[str, dict[str, str]] = {}
        """Layer -> tensor -> dtype before its last cast in a full look."""
        self._model = None if model is None else weakref.ref(model)
        self._places: weakref.WeakKeyDictionary[nn.Module, tuple[str, str]] = weakref.WeakKeyDictionary()
        self._hooks = GlobalHooks(self._before, self._after)
        if model is not None:
            self.find(model)

    def find(self, model: nn.Module) -> None:
        """Adds the layers of a model."""
        for name, module in model.named_modules():
            self._adopt(module, name)

    def expected(self) -> dict[str, weakref.ref[nn.Module]]:
        """Layers that should have been seen: attention that is in high precision has doors, and casts nothing. Of
        layers that share one matrix, each for another kind of call, those that ran."""
        used = {id(layer.parameter) for n, ref in self.layers.items() if n in self.seen and _is_layer(layer := ref())}
        return {
            name: ref
            for name, ref in self.layers.items()
            if name in self.seen
            or (layer := ref()) is None
            or (_is_layer(layer) and (layer.parameter.dim() > 2 or id(layer.parameter) not in used))
        }

    @property
    def attached(self) -> bool:
        """Whether it watches."""
        return self._hooks.attached

    def attach(self) -> None:
        """Starts watching."""
        self._hooks.attach()

    def detach(self) -> None:
        """Stops watching."""
        self._hooks.detach()

    def _adopt(self, module: nn.Module, name: str = "") -> None:
        if not isinstance(doors := getattr(module, "quantizers", None), Doors):
            return
        layer = getattr(module, "name", "") or name or f"{type(module).__name__} {len(self.layers)}"
        namesake = self.layers.get(layer)
        if namesake is not None and namesake() not in (None, module):
            layer = f"{layer} ({len(self.layers)})"  # another model has a layer of this name
        self.layers[layer] = weakref.ref(module)
        for tensor, door in doors.named_children():
            self._places[door] = (layer, tensor)
        if self.on_layer is not None:
            self.on_layer(layer, module)

    def _before(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():  # must come first, also in _after: Dynamo traces global hooks
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
        if not (args := in_numbers(args)) or not self._counts(door, tensor, kwargs.get("record", True) is not False):
            return
        self.seen.add(layer)
        measured = self.collector.wants(layer, tensor)
        # a weight is measured once a step but checked in every micro-batch: a stale cache serves the later ones
        checked = self.collector.looking and self.collector.config.watches(layer, tensor)
        if not measured and not checked:
            return
        with unobserved(args[0]):  # selective checkpointing would count our operations
            if measured:
                self._take(layer, tensor, *args[:3], *output)
            if checked and self.on_operands is not None:
                with self.collector.timed():
                    self.on_operands(layer, tensor, door, args[0], *output)

    def _take(self, layer: str, tensor: str, x: Tensor, row_spec: Any, col_spec: Any, row: Any, col: Any) -> None:
        recipe = self._recipe(layer)
        shared = row_spec == col_spec and isinstance(col, QuantizedTensor) and col_spec.granularity.transposes
        shared = shared and col_spec.transform is None
        if row is None and shared:
            row, col = col.t(), None  # one cast serves both GEMMs
        self.dtypes.setdefault(layer, {})[tensor] = str(x.dtype).removeprefix("torch.")
        extent = None
        for direction, of, x_q in casts_of(x, row, col):
            found = extent if x_q.spec.transform is None else None  # that of x, not of what x became
            found = self.collector.cast(layer, tensor, direction, of, x_q, source="door", recipe=recipe, extent=found)
            extent = found if x_q.spec.transform is None else extent
        self.collector.finished(layer, tensor)

    def _place(self, door: Quantizer) -> tuple[str, str] | None:
        place = self._places.get(door)
        if place is None and self._model is not None and (model := self._model()) is not None:
            self.find(model)  # converted later
            place = self._places.setdefault(door, ("", ""))  # a door of another model
        return place if place and place[1] else None

    def _recipe(self, layer: str) -> str:
        module: Any = self.layers[layer]()
        call = getattr(module, "last_call", None)
        return str(call.recipe.name if call is not None else module.resolved.name)

    def _counts(self, door: Quantizer, tensor: str, record: bool) -> bool:
        """Whether this cast belongs to training and is no repetition by recomputation."""
        if tensor in _GRADIENTS:
            return True
        return record and not (torch._C._current_graph_task_id() != -1 and repeats_a_forward())


def _is_layer(module: Any) -> TypeGuard[QuantizedLayer]:
    return isinstance(module, QuantizedLayer)
