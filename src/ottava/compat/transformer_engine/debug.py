"""TransformerEngine's debug tool: nvdlfw_inspect in a script of `python -m ottava.compat.transformer_engine`.

A configuration changes the casts of every `autocast` (DisableQuantizationGEMM, DisableQuantizationLayer, FakeQuant,
PerTensorScaling). Its statistics and dumps are those of a watch, in the folder `ottava` of `log_dir`; `ottava report`
shows them.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ottava.compat.transformer_engine.common.recipe import GROUPED
from ottava.engine.functional import QuantizedLayer
from ottava.measure.layer_names import matches
from ottava.numerics.formats import get_format
from ottava.numerics.tensor import QuantizationSpec
from ottava.ops.quantize import quantize
from ottava.recipe import CELL_OF, GEMMS, HIGH_PRECISION, Override, Recipe, get_recipe
from ottava.watching.config import Intervention, WatchConfig
from ottava.watching.doors import changed
from ottava.watching.session import Watch


class _Watch(Watch):
    def _check_patterns(self, names: Sequence[str]) -> None:
        """As TransformerEngine: a pattern may match no layer."""


@dataclass(frozen=True)
class _Changed(Recipe):
    """A recipe with the changes of a configuration."""

    inner: Recipe = field(default_factory=lambda: get_recipe("bf16"), repr=False)
    changes: tuple[Intervention, ...] = field(default=(), repr=False)
    kept: dict[str, Recipe] = field(default_factory=dict, repr=False, compare=False)

    def for_layer(self, layer: str) -> Recipe:
        """The recipe of the layer with that name."""
        if layer not in self.kept:
            chosen = [one for one in self.changes if matches(layer.removeprefix(GROUPED), one.layers)]
            faked = {gemm for one in chosen for gemm in one.gemms if one.action == "fake"}
            others = (one for one in chosen if one.action != "fake")
            made = functools.reduce(changed, others, self.inner.for_layer(layer))
            made = replace(made, **dict.fromkeys(faked, HIGH_PRECISION))  # type: ignore[arg-type]  # GEMMs only
            if faked:
                object.__setattr__(made, "casts", True)  # its doors must run
            self.kept[layer] = made
        return self.kept[layer]


class Tool:
    """The functions of nvdlfw_inspect.api, and its namespace `transformer_engine`: one object of a process."""

    watch: Watch | None = None
    changes: tuple[Intervention, ...] = ()
    on = False

    def __init__(self) -> None:
        self.end_debug()
        self.transformer_engine = self

    def initialize(
        self, config_file: str | Path = "", *, log_dir: str | Path = ".", init_training_step: int = 0, **others: Any
    ) -> None:
        """Reads a configuration; unknown features in it, and statistics that no watch has, are warned of.

        Args:
            others: accepted: features are TransformerEngine's own, and the watch writes files of its own.
        Raises:
            ValueError: it was initialized before.  ConfigError: the file has the wrong form.
        """
        if self.on:
            raise ValueError("nvdlfw_inspect: initialize was called twice; needs end_debug() between")
        self.on = True
        if config_file:
            config = WatchConfig.load(Path(config_file))
            self.changes = config.interventions
            for note in config.notes:
                warnings.warn(note, stacklevel=2)
            if config.looks or config.dump.periods:
                only = config.model_copy(update={"interventions": (), "notes": ()})
                self.watch = _Watch(None, Path(log_dir) / "ottava", only, step=init_training_step)

    def end_debug(self) -> None:
        """Ends changes and statistics."""
        if self.watch is not None:
            self.watch.close()
        self.on, self.watch, self.changes, self.layers = False, None, (), 0
        self.made: dict[Recipe, Recipe] = {}

    def step(self) -> None:
        """Ends a step."""
        if self.watch is not None:
            self.watch.step()

    def infer_and_assign_layer_names(self, model: nn.Module) -> None:
        """Names all modules by their places in the model."""
        for name, module in model.named_modules(prefix="model"):
            module.name = name

    def adopt(self, layer: QuantizedLayer) -> None:
        """Names a layer that was just built and got no name, and lets its doors fake casts."""
        self.layers += 1
        layer.name = layer.name or f"Layer_{self.layers}"
        for tensor, door in layer.quantizers.named_children():
            door.register_forward_hook(functools.partial(self._fake, layer, tensor))

    def _fake(self, layer: QuantizedLayer, tensor: str, door: nn.Module, args: Any, both: Any) -> Any:
        """The operands at a door, with what FakeQuant gives in place of numbers in high precision."""
        made = list(both)
        for place, direction in enumerate(("row", "col")):
            change = self._change(layer.name, CELL_OF[tensor, direction][0], tensor, "fake")
            if isinstance(made[place], Tensor) and change is not None:
                x = args[0].detach()
                numbers = quantize(x, QuantizationSpec(get_format(change.format))).dequantize(x.dtype)
                made[place] = numbers.t() if place else numbers
        return tuple(made)

    def recipe(self, recipe: Recipe) -> Recipe:
        """The recipe of an autocast, with the changes of the configuration."""
        if self.changes and recipe not in self.made:
            cells: dict[str, Any] = {gemm: getattr(recipe, gemm) for gemm in GEMMS}
            asked = Override("*", tuple(cells.items()))  # a recipe with overrides is asked for each layer
            self.made[recipe] = _Changed(recipe.name, **cells, overrides=(asked,), inner=recipe, changes=self.changes)
        return self.made.get(recipe, recipe)

    def _change(self, layer: str, gemm: str, tensor: str, *actions: str) -> Intervention | None:
        layer, left = layer.removeprefix(GROUPED), (one for one in self.changes if one.action in actions)
        found = (one for one in left if gemm in one.gemms and (not tensor or tensor in one.tensors))
        return next((one for one in found if matches(layer, one.layers)), None)

    def fp8_gemm_enabled(self, layer_name: str, gemm: str, iteration: int) -> tuple[bool, int]:
        """Whether the configuration leaves a GEMM in FP8; and the step for which to ask again."""
        return self._change(layer_name, gemm, "", "fake", "high_precision") is None, iteration + 1
