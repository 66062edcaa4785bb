"""Lightning: a precision plugin that converts the model, and keeps its scaling state in Lightning's checkpoints.

    trainer = lightning.Trainer(plugins=[OttavaPrecision("delayed")])

Lightning loads a checkpoint's weights before it calls the plugin, into a model that is not converted yet. So the plugin
keeps histories in its own part of the checkpoint, and `state_dict` there has the keys of the BF16 model.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn

from ottava.doors.entries import take_histories
from ottava.doors.host import need_host, refuse_model
from ottava.engine.functional import quantized_layers
from ottava.nn.convert import ConversionReport, Filter, convert
from ottava.recipe import Recipe, get_recipe

need_host("lightning")

from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision  # noqa: E402  # after the check

_KEY = "ottava_scaling_state"


class _Converts(Precision):
    """Converts in `convert_module`; carries scaling states through checkpoints."""

    recipe: Recipe
    filter: Filter | None
    report: ConversionReport | None = None
    """What `ottava.convert` did; None: not called yet."""

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Converts the model in place, once: Lightning calls this for each fit, validate, test and predict.

        Raises:
            ValueError: somebody has converted, compiled, sharded or quantized the model before.
        """
        module = super().convert_module(module)
        mine = self.report is not None and self.report.model is module
        if not (mine and quantized_layers(module)):
            refuse_model(type(self).__name__, module)
            self.report = convert(module, self.recipe, filter=self.filter)
        return module

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Moves the histories from the model's state dict to the plugin's part."""
        if self.report and (state := take_histories(self.report.model, checkpoint["state_dict"])):
            checkpoint[_KEY] = state

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Loads the histories into the converted model. A recipe that keeps none takes none.

        Raises:
            ValueError: the checkpoint has a history of a layer that keeps none here.
        """
        if self.report is None or not (state := checkpoint.get(_KEY)):
            return
        model = self.report.model
        kept = take_histories(model, model.state_dict())
        if kept and (homeless := sorted(state.keys() - kept.keys())):
            raise ValueError(
                f"{type(self).__name__}: the checkpoint has scaling state that this model has no place for, "
                f"{homeless[0]} ({len(homeless)} keys in all); resume with the recipe and filter of the saved run"
            )
        model.load_state_dict(state, strict=False)


class OttavaPrecision(_Converts, MixedPrecision):
    """FP8 under torch.autocast: weights keep their dtype, everything else runs in 16 bits.

    Args:
        recipe: a Recipe or its name.
        precision: "bf16-mixed", or "16-mixed" with a GradScaler.
        device: of torch.autocast; None: "cuda" where there is one, else "cpu".
        filter: as of `ottava.convert`.
        scaler: a GradScaler for "16-mixed"; None: Lightning's.
    Raises:
        ValueError: the recipe is unknown.

    Edge cases: give the Trainer no `precision` beside it. Strategies with a precision plugin of their own (FSDP,
        DeepSpeed) refuse it. `ModelCheckpoint(save_weights_only=True)` does not ask a plugin: under recipes with
        histories its `state_dict` has them, and a model that is not converted loads it with strict=False.
    """

    def __init__(
        self,
        recipe: Recipe | str = "tensorwise",
        precision: Literal["bf16-mixed", "16-mixed"] = "bf16-mixed",
        *,
        device: str | None = None,
        filter: Filter | None = None,
        scaler: Any = None,
    ) -> None:
        super().__init__(precision, device or ("cuda" if torch.cuda.is_available() else "cpu"), scaler)
        self.recipe, self.filter = get_recipe(recipe), filter


class OttavaTruePrecision(_Converts, HalfPrecision):
    """FP8 on a model whose weights are BF16 or FP16.

    Args:
        recipe, filter: as of `OttavaPrecision`.
        precision: "bf16-true" or "16-true".
    """

    def __init__(
        self,
        recipe: Recipe | str = "tensorwise",
        precision: Literal["bf16-true", "16-true"] = "bf16-true",
        *,
        filter: Filter | None = None,
    ) -> None:
        super().__init__(precision)
        self.recipe, self.filter = get_recipe(recipe), filter
