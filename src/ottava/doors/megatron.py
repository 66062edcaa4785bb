"""Megatron Core: a layer spec whose linears are ottava's; the recipe comes from Megatron's own FP8 arguments.

    model = GPTModel(config, gpt_layer_spec(config), ...)         # config: TransformerConfig(fp8="hybrid", ...)

Embedding, attention and output layer stay Megatron's. `ottava.doors.megatron_linear` has the linears.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from types import MappingProxyType
from typing import Any

from ottava.doors.host import need_host
from ottava.doors.megatron_linear import (
    OttavaColumnParallelLinear,
    OttavaRowParallelLinear,
    ParallelLinear,
    recipe_of,
)
from ottava.engine.state import ScalingState
from ottava.recipe import Recipe, get_recipe

need_host("megatron")

from megatron.core import parallel_state  # noqa: E402  # after the check
from megatron.core.models.backends import LocalSpecProvider  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear  # noqa: E402
from megatron.core.transformer.transformer_layer import TransformerLayer  # noqa: E402


class OttavaTransformerLayer(TransformerLayer):
    """Megatron's layer; it names its linears, keeps first and last blocks in BF16, and moves predicted scales.

    Predicted scales move when Megatron's schedule marks the first micro-batch of the next step: Megatron's optimizers
    step copies of the parameters, so no step tells of the end of this one.

    Args:
        recipe: in place of the recipe that the arguments name: a Recipe or its name.
    """

    is_first_microbatch = False
    """Megatron's schedules set it."""

    def __init__(self, config: Any, *args: Any, recipe: Recipe | str | None = None, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        block, last = self.layer_number - 1, config.num_layers - config.num_layers_at_end_in_bf16
        edge = config.first_last_layers_bf16 and not config.num_layers_at_start_in_bf16 <= block < last
        used = get_recipe("bf16") if edge else recipe_of(config) if recipe is None else get_recipe(recipe)
        self.linears = tuple(module for module in self.modules() if isinstance(module, ParallelLinear))
        for name, module in self.named_modules():
            if isinstance(module, ParallelLinear):
                module.adopt(used, f"decoder.layers.{block}.{name}")
        group = None
        if parallel_state.model_parallel_is_initialized():
            group = parallel_state.get_amax_reduction_group(
                with_context_parallel=True, tp_only_amax_red=config.tp_only_amax_red
            )
        self.state = ScalingState(self, group)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As Megatron's."""
        if self.is_first_microbatch:
            self.is_first_microbatch = False
            for layer in self.linears:
                layer.quantizers.weight.stepped()
            if self.state.predicts:
                self.state.update()
        return super().forward(*args, **kwargs)


_OURS: Mapping[type, type] = MappingProxyType(
    {
        ColumnParallelLinear: OttavaColumnParallelLinear,
        RowParallelLinear: OttavaRowParallelLinear,
        TransformerLayer: OttavaTransformerLayer,
    }
)


class OttavaSpecProvider(LocalSpecProvider):
    """Megatron's local backend with ottava's linears, for what takes a backend."""

    def column_parallel_linear(self) -> type:
        """Split by output features."""
        return OttavaColumnParallelLinear

    def row_parallel_linear(self) -> type:
        """Split by input features."""
        return OttavaRowParallelLinear

    def grouped_mlp_modules(self, *grouped: bool) -> Any:
        """The experts of a mixture, one linear each."""
        return with_ottava(super().grouped_mlp_modules(*grouped))


def with_ottava(spec: Any, recipe: Recipe | str | None = None) -> Any:
    """A copy of a spec of Megatron's local modules in which linears and transformer layers are ottava's.

    Args:
        spec: a ModuleSpec, or what holds some: TransformerBlockSubmodules, a list.
        recipe: in place of the recipe that the config names.
    """
    if isinstance(spec, type):
        return _OURS.get(spec, spec)
    if isinstance(spec, list | tuple):
        return type(spec)(with_ottava(one, recipe) for one in spec)
    if not is_dataclass(spec):
        return spec
    changed = {field.name: with_ottava(getattr(spec, field.name), recipe) for field in fields(spec)}
    if changed.get("module") is OttavaTransformerLayer and recipe is not None:
        changed["params"] = {**changed["params"], "recipe": recipe}
    copied: Any = spec
    return replace(copied, **changed)


def gpt_layer_spec(config: Any, recipe: Recipe | str | None = None) -> Any:
    """The layer spec of a GPTModel, from Megatron's `get_gpt_layer_local_spec`.

    Args:
        config: the TransformerConfig of the model.
        recipe: in place of the recipe that the config names.
    """
    names = ("qk_layernorm", "multi_latent_attention", "normalization")
    spec = get_gpt_layer_local_spec(config.num_moe_experts, **{name: getattr(config, name) for name in names})
    return with_ottava(spec, recipe)
