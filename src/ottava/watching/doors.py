"""Watches the casts of ottava layers at their doors, where the operands of the GEMMs are made.

It uses torch's global hooks, attached only in watched steps. So it sees layers that are converted later, and a weight
keeps its cache, which a hook on the door would switch off. `Interventions` changes the casts of some of these layers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from ottava.base.errors import Guard
from ottava.engine.functional import QuantizedLayer
from ottava.engine.quantizer import Doors, Quantizer
from ottava.measure.layer_names import matches
from ottava.measure.observer import casts_of, in_numbers
from ottava.numerics.formats import get_format
from ottava.numerics.tensor import QuantizationSpec, QuantizedTensor
from ottava.recipe import CELL_OF, HIGH_PRECISION, GemmRecipe, Recipe
from ottava.watching.collector import Collector
from ottava.watching.config import Intervention
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
        guard: wraps what a forward calls.
    """

    def __init__(
        self,
        collector: Collector,
        model: nn.Module | None = None,
        on_operands: OnOperands | None = None,
        on_layer: Callable[[str, nn.Module], object] | None = None,
        guard: Guard = lambda hook: hook,
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
        self._hooks = GlobalHooks(guard(self._before), guard(self._after))
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


class Interventions:
    """The changes of a watch; `undo` takes them back.

    Args:
        config: the changes.
        tell: called with one sentence about each layer whose casts were changed, or could not be.
    """

    def __init__(self, config: Sequence[Intervention], tell: Callable[[str], object]) -> None:
        self.config, self._tell = tuple(config), tell
        self._before: dict[str, tuple[QuantizedLayer, Recipe]] = {}

    def apply(self, name: str, module: nn.Module) -> None:
        """Changes the casts of a layer that has this full name, if an intervention matches it."""
        chosen = [change for change in self.config if matches(name, change.layers)]
        if not chosen or name in self._before or not isinstance(module, QuantizedLayer):
            return
        layer: Any = module
        try:
            recipe = layer.resolved
            for change in chosen:
                recipe = changed(recipe, change)
            self._before[name] = layer, layer.recipe
            layer.adopt(recipe, name)
        except (ValueError, NotImplementedError) as error:
            self._before.pop(name, None)
            self._tell(f"cannot change the casts of {name}: {error}")
            return
        self._tell(f"changed the casts of {name}: {', '.join(sorted({change.action for change in chosen}))}")

    def missed(self, names: Iterable[str]) -> None:
        """Names the layers of other packages that an intervention matches: only their own package can change them."""
        other = [n for n in names if any(matches(n, change.layers) for change in self.config)]
        if other:
            shown = ", ".join(other[:6]) + (f" and {len(other) - 6} more" if len(other) > 6 else "")
            self._tell(
                f"cannot change the casts of {shown}: they are no layers of ottava; ottava.convert makes them so"
            )

    def undo(self) -> None:
        """Gives every layer its recipe back."""
        for name, (layer, recipe) in self._before.items():
            layer.adopt(recipe, name)
        self._before.clear()


def changed(recipe: Recipe, change: Intervention) -> Recipe:
    """A resolved recipe with one intervention made.

    Raises:
        ValueError: no GEMM takes the operands together.

    Example:
        >>> from ottava.recipe import get_recipe
        >>> str(changed(get_recipe("tensorwise"), Intervention(gemms=["dgrad"], action="high_precision")).dgrad)
        'high precision x high precision'
    """
    gemms = {gemm: _changed_gemm(getattr(recipe, gemm), gemm, change) for gemm in change.gemms}
    cells: dict[str, Any] = {gemm: cell for gemm, cell in gemms.items() if cell is not None}
    return replace(recipe, name=f"{recipe.name}+{change.action}", **cells)


def _changed_gemm(cell: GemmRecipe, gemm: str, change: Intervention) -> GemmRecipe | None:
    if change.action == "high_precision":
        return HIGH_PRECISION
    sides = {side: tensor for (tensor, _), (of, side) in CELL_OF.items() if of == gemm}
    if change.action == "fake":
        spec = QuantizationSpec(get_format(change.format))
        operands: dict[str, Any] = {side: spec if tensor in change.tensors else None for side, tensor in sides.items()}
        if not any(operands.values()):
            return None
        return GemmRecipe(**operands, compute="bf16")
    present = {side: getattr(cell, side) for side, tensor in sides.items() if tensor in change.tensors}
    # the margin is of a prediction; the recipes of present amaxes have none
    now = {s: replace(spec, scaling="current", margin=0) for s, spec in present.items() if spec is not None}
    return replace(cell, **now)
