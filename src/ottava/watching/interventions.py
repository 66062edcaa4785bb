"""Changes the casts of some layers of ours while a watch goes on, as `WatchConfig.interventions` asks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from ottava.engine.layer import QuantizedLayer
from ottava.measure.layer_names import matches
from ottava.numerics.formats import get_format
from ottava.numerics.tensor import QuantizationSpec
from ottava.recipe import CELL_OF, HIGH_PRECISION, GemmRecipe, Recipe
from ottava.watching.config import Intervention


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
