"""transformers: `OttavaConfig` is a `quantization_config` for `from_pretrained`, and stays with a model's checkpoints.

transformers loads the plain weights, renames and merges them as it knows, and only then this door converts the model. A
checkpoint of such a model has entries that transformers does not load (`doors.entries`); this door reads them itself.

    model = AutoModelForCausalLM.from_pretrained(NAME, quantization_config=OttavaConfig("delayed"))
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ottava.base.errors import unknown_name
from ottava.doors.entries import NOT_LOADED, pack_histories, read_entries, refuse_stacks, unpack_before_load
from ottava.doors.host import need_host, refuse_model, without
from ottava.nn.convert import ConversionReport, convert
from ottava.nn.foreign import layers_of
from ottava.recipe import RECIPES, Recipe, get_recipe

need_host("transformers")

from transformers.quantizers import HfQuantizer  # noqa: E402
from transformers.quantizers.auto import register_quantization_config, register_quantizer  # noqa: E402
from transformers.utils.quantization_config import QuantizationConfigMixin  # noqa: E402

METHOD = "ottava"


@register_quantization_config(METHOD)
class OttavaConfig(QuantizationConfigMixin):
    """Puts a model of transformers under a recipe when it is loaded, and again when its checkpoints are loaded.

    Args:
        recipe: a Recipe, its name, or its `to_dict()`.
        skip: shell patterns of full layer names that stay in high precision, beside those of `default_filter`.
        weights: "fp8" stores weights that the recipe casts only as codes (docs/weights.md).
        push_histories: whether a push to the Hub has the histories of delayed scaling; files on disk always do.
    Raises:
        ValueError, TypeError: an unknown recipe, field or word.

    Example:
        >>> OttavaConfig("delayed", skip="*.layers.0.*").to_dict()["skip"]
        ['*.layers.0.*']
    """

    def __init__(
        self,
        recipe: Recipe | str | Mapping[str, Any] = "tensorwise",
        *,
        skip: Sequence[str] | str = (),
        weights: Literal["fp8"] | None = None,
        push_histories: bool = False,
        quant_method: str = METHOD,
        **unknown: Any,
    ) -> None:
        known = ("recipe", "skip", "weights", "push_histories")
        for name in unknown:
            raise TypeError(f"OttavaConfig: {unknown_name('field', name, known)}")
        if weights not in (None, "fp8"):
            raise ValueError(f"OttavaConfig: {unknown_name('weights', weights, ('fp8',))}, or None")
        self.quant_method = METHOD
        self.recipe = Recipe.from_dict(recipe) if isinstance(recipe, Mapping) else get_recipe(recipe)
        self.skip = (skip,) if isinstance(skip, str) else tuple(skip)
        self.weights, self.push_histories = weights, push_histories

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; a registered recipe is its name."""
        recipe = self.recipe
        named = RECIPES.get(recipe.name) == recipe
        plain = {"recipe": recipe.name if named else recipe.to_dict(), "skip": list(self.skip)}
        return plain | {"weights": self.weights, "push_histories": self.push_histories, "quant_method": METHOD}

    def convert(self, model: nn.Module) -> ConversionReport:
        """Puts a model under the recipe that `from_pretrained` has not loaded, such as one from `from_config`.

        Raises:
            ValueError: somebody has changed the model already (`refuse_model`), or a pattern matches no layer.
        """
        refuse_model("OttavaConfig", model)
        layers = layers_of(model)
        chosen = without("OttavaConfig: skip", self.skip, layers)
        if self.weights:
            refuse_stacks({name: layer for name, layer in layers.items() if chosen(name, layer) is None})
        report = convert(model, self.recipe, filter=chosen, weights=self.weights)
        model.register_load_state_dict_pre_hook(unpack_before_load)
        host: Any = model
        host.config.quantization_config, host.quantization_method = self, METHOD
        host.hf_quantizer = OttavaQuantizer(self, pre_quantized=False)
        host.is_quantized = self.weights == "fp8"  # the others are plain parameters: half() and float() work
        return report


@register_quantizer(METHOD)
class OttavaQuantizer(HfQuantizer):
    """What transformers calls while it loads and saves a model with an `OttavaConfig`."""

    is_trainable = is_qat_trainable = is_compileable = True
    _files: Sequence[str] = ()

    def is_serializable(self) -> bool:
        """Whether `save_pretrained` works."""
        return True

    def get_new_dtype(self, converter: Any, param: Any, dtype: torch.dtype | None) -> torch.dtype | None:
        """The model's own, for codes too: they are placeholders until the conversion."""
        return dtype

    def _process_model_before_weight_loading(self, model: Any, checkpoint_files: Any = None, **_: Any) -> None:
        self._files = checkpoint_files or ()
        if self.pre_quantized:
            ignored = model._keys_to_ignore_on_load_unexpected or ()
            model._keys_to_ignore_on_load_unexpected = {*ignored, *NOT_LOADED}

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        self.quantization_config.convert(model)
        if self.pre_quantized:
            model.load_state_dict(dict(read_entries(model, self._files)), strict=False)
        return model

    def get_state_dict_and_metadata(self, model: Any) -> tuple[Mapping[str, Tensor] | None, dict[str, str]]:
        """The state dict with the histories in one entry, or without them where the model goes to the Hub."""
        frame: Any = sys._getframe(1)  # `save_pretrained`, which tells neither what it was given nor where it saves to
        state, pushes = frame.f_locals.get("state_dict"), frame.f_locals.get("push_to_hub", False)
        while frame is not None and not pushes:
            frame, pushes = frame.f_back, frame.f_code.co_name == "push_to_hub"
        if getattr(model, "_hf_peft_config_loaded", False):
            return state, {}
        state = dict(model.state_dict() if state is None else state)
        pack_histories(model, state, leave_out=pushes and not self.quantization_config.push_histories)
        return state, {}
