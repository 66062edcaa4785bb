"""TransformerEngine's debug tool: nvdlfw_inspect in a script of `python -m ottava.compat.transformer_engine`.

A configuration changes the casts of every `autocast` (DisableQuantizationGEMM, DisableQuantizationLayer, FakeQuant,
PerTensorScaling). Its statistics and dumps are those of a watch, in the folder `ottava` of `log_dir`; `ottava report`
shows them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from ottava.compat.transformer_engine.common.recipe import GROUPED
from ottava.compat.transformer_engine.pytorch.quantizers import Float8CurrentScalingQuantizer
from ottava.engine.functional import QuantizedLayer
from ottava.interop.te_config import TENSORS
from ottava.measure.layer_names import matches
from ottava.numerics.formats import get_format
from ottava.numerics.tensor import QuantizationSpec
from ottava.ops.quantize import quantize
from ottava.recipe import CELL_OF, GEMMS, Override, Recipe, get_recipe
from ottava.watching.config import Intervention, WatchConfig
from ottava.watching.doors import changed
from ottava.watching.session import Watch

_UNCAST = MappingProxyType({"action": "high_precision"})


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
            cells = (one if one.action != "fake" else one.model_copy(update=_UNCAST) for one in chosen)
            made = functools.reduce(changed, cells, self.inner.for_layer(layer))
            if any(one.action == "fake" for one in chosen):
                object.__setattr__(made, "casts", True)  # its doors must run
            self.kept[layer] = made
        return self.kept[layer]


class Tool:
    """The functions of nvdlfw_inspect.api, and its namespace `transformer_engine`: one object of a process."""

    def __init__(self) -> None:
        self.watch: Watch | None = None
        self.end_debug()
        self.transformer_engine = self

    def initialize(
        self,
        config_file: str | Path = "",
        feature_dirs: Any = None,
        statistics_logger: Any = None,
        log_dir: str | Path = ".",
        init_training_step: int = 0,
        **others: Any,
    ) -> None:
        """Reads a configuration; unknown features in it, and statistics that no watch has, are warned of.

        Args:
            feature_dirs, statistics_logger, others: accepted; features are TransformerEngine's own.
        Raises:
            ValueError: it was initialized before.  ConfigError: the file has the wrong form.
        """
        if self.on:
            raise ValueError("nvdlfw_inspect: initialize was called twice; needs end_debug() between")
        self.on = True
        if config_file:
            config = WatchConfig.load(Path(config_file))
            self.changes = config.interventions
            if config.looks or config.dump.periods:
                only = config.model_copy(update={"interventions": ()})
                self.watch = Watch(None, Path(log_dir) / "ottava", only, step=init_training_step)

    def end_debug(self) -> None:
        """Ends changes and statistics."""
        if self.watch is not None:
            self.watch.close()
        self.on, self.watch, self.layers = False, None, 0
        self.changes: tuple[Intervention, ...] = ()
        self.made: dict[Recipe, Recipe] = {}

    def step(self) -> None:
        """Ends a step."""
        if self.watch is not None:
            self.watch.step()

    def infer_and_assign_layer_names(self, model: nn.Module) -> None:
        """Names all modules by their places in the model."""
        for name, module in model.named_modules(prefix="model"):
            module.name = name  # type: ignore[assignment]  # as nvdlfw_inspect does

    def name(self) -> str:
        """A name for a layer that got none."""
        self.layers += 1
        return f"Layer_{self.layers}"

    def adopt(self, layer: QuantizedLayer) -> None:
        """Lets the doors of a layer that was just built fake casts."""
        for tensor, door in layer.quantizers.named_children():
            door.register_forward_hook(functools.partial(self._fake, layer, tensor))

    def _fake(self, layer: QuantizedLayer, tensor: str, door: nn.Module, args: Any, both: Any) -> Any:
        """The operands at a door, with what FakeQuant gives in place of numbers in high precision."""
        made = list(both)
        for place, direction in enumerate(("row", "col")):
            change = self._change(layer.name.removeprefix(GROUPED), CELL_OF[tensor, direction][0], tensor, "fake")
            if isinstance(made[place], Tensor) and change is not None:
                numbers = _faked(args[0], change)
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
        found = (one for one in self.changes if matches(layer, one.layers) and gemm in one.gemms)
        return next((o for o in found if o.action in actions and (not tensor or tensor in o.tensors)), None)

    def fp8_gemm_enabled(self, layer_name: str, gemm: str, iteration: int) -> tuple[bool, int]:
        """Whether the configuration leaves a GEMM in FP8; and the step for which to ask again."""
        return self._change(layer_name, gemm, "", "fake", "high_precision") is None, iteration + 1

    def modify_tensor_enabled(self, layer_name: str, gemm: str, tensor_name: str, iteration: int) -> tuple[bool, int]:
        """Whether it casts an operand in another way; and the step for which to ask again."""
        return self._change(layer_name, gemm, TENSORS[tensor_name], "fake", "current") is not None, iteration + 1

    def modify_tensor(
        self, layer_name: str, gemm: str, tensor_name: str, tensor: Tensor, default_quantizer: Any, **others: Any
    ) -> Tensor:
        """The operand after that cast: codes under one scale (PerTensorScaling), or their numbers (FakeQuant).

        Raises:
            ValueError: the configuration does not cast it.
        """
        change = self._change(layer_name, gemm, TENSORS[tensor_name], "fake", "current")
        if change is None:
            raise ValueError(f"modify_tensor: no feature casts {tensor_name} of {layer_name} in {gemm}")
        if change.action == "current":
            return Float8CurrentScalingQuantizer(default_quantizer.dtype)(tensor)
        return _faked(tensor, change)

    def inspect_tensor_enabled(self, layer_name: str, tensor_name: str, iteration: int) -> tuple[bool, int]:
        """Whether the watch looks at a tensor in this step; and the step for which to ask again."""
        looks = () if self.watch is None else self.watch.config.looks
        asked = (one for one in looks if one.has(layer_name, TENSORS[tensor_name]))
        return any(one.chooses(iteration + 1) for one in asked), iteration + 1


def _faked(x: Tensor, change: Intervention) -> Tensor:
    rows = x.detach().reshape(-1, x.shape[-1])
    return quantize(rows, QuantizationSpec(get_format(change.format))).dequantize(x.dtype).view(x.shape)
