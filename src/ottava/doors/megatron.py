"""Megatron Core: a layer spec whose linears are ottava's; the recipe comes from Megatron's own FP8 arguments.

    model = GPTModel(config, gpt_layer_spec(config), ...)         # config: TransformerConfig(fp8="hybrid", ...)

Embedding, attention and output layer stay Megatron's. The linears keep Megatron's parameters, initial values,
checkpoints and process groups. Split layers run as those of `ottava.distributed` do: ranks agree on scales, and codes
travel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from types import MappingProxyType
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from ottava.base.errors import unknown_name
from ottava.compat.transformer_engine.common import recipe as te
from ottava.doors.host import need_host
from ottava.engine.state import ScalingState
from ottava.nn.layer import Layer
from ottava.nn.sharding import Sharding
from ottava.recipe import HIGH_PRECISION, Recipe, get_recipe

need_host("megatron")

from megatron.core import parallel_state  # noqa: E402  # after the check
from megatron.core.models.backends import LocalSpecProvider  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear  # noqa: E402
from megatron.core.transformer.transformer_layer import TransformerLayer  # noqa: E402

_REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "fp8_param": "parameters stay in params_dtype",
        "fp4_param": "parameters stay in params_dtype",
        "fp8_dot_product_attention": "attention is Megatron's own, in high precision",
        "fp8_multi_head_attention": "attention is Megatron's own, in high precision",
    }
)
_FORMATS = MappingProxyType({"e4m3": te.Format.E4M3, "hybrid": te.Format.HYBRID})
_CURRENT: Mapping[str, type[te.Recipe]] = MappingProxyType(
    {"tensorwise": te.Float8CurrentScaling, "blockwise": te.Float8BlockScaling, "mxfp8": te.MXFP8BlockScaling}
)


def recipe_of(config: Any) -> Recipe:
    """The recipe that Megatron's arguments name, as TransformerEngine would run it; "bf16" without fp8 and fp4.

    Args:
        config: a TransformerConfig; its fields fp8, fp8_recipe, fp8_margin, fp8_amax_history_len,
            fp8_amax_compute_algo, fp8_wgrad, fp4 and fp4_recipe are read.
    Raises:
        NotImplementedError: an argument that this door cannot honour.
        ValueError: an unknown recipe or format.
    """
    for name, why in _REFUSED.items():
        if getattr(config, name, False):
            raise NotImplementedError(f"ottava.doors.megatron: {name} is not in ottava: {why}; leave it out")
    asked = config.fp4_recipe if config.fp4 else config.fp8_recipe
    name = getattr(asked, "value", asked)  # Megatron takes its enumeration or a text
    if config.fp4:
        if name != "nvfp4":
            raise ValueError(f"ottava.doors.megatron: {unknown_name('fp4_recipe', name, ['nvfp4'])}")
        recipe = te.NVFP4BlockScaling().ottava
    elif not config.fp8:
        return get_recipe("bf16")
    elif config.fp8 not in _FORMATS:
        raise ValueError(f"ottava.doors.megatron: {unknown_name('fp8 format', config.fp8, _FORMATS)}")
    elif name == "delayed":
        history = {key: getattr(config, f"fp8_{key}") for key in ("margin", "amax_history_len", "amax_compute_algo")}
        recipe = te.DelayedScaling(fp8_format=_FORMATS[config.fp8], **history).ottava
    elif name in _CURRENT:
        recipe = _CURRENT[name](fp8_format=_FORMATS[config.fp8]).ottava
    else:
        raise ValueError(f"ottava.doors.megatron: {unknown_name('fp8_recipe', name, ['delayed', *_CURRENT])}")
    return recipe if config.fp8_wgrad else replace(recipe, wgrad=HIGH_PRECISION)


class ParallelLinear(Layer):
    """What both parallel linears share: Megatron makes the parameters, ottava runs them."""

    skip_bias_add: bool
    tp_group: dist.ProcessGroup

    def take(self, split: int, places: tuple[Placement, Placement], whole: Mapping[str, bool]) -> None:
        """Runs at the end of Megatron's constructor.

        Args:
            split: which dimension of the weight (N, K) the ranks share.
            places: of input and output.
            whole: settings under which Megatron itself gathers or splits; the layer refuses one that is True.
        """
        for name, asked in whole.items():
            if asked:
                raise NotImplementedError(
                    f"ottava.doors.megatron: {type(self).__name__} does not do {name}; take Megatron's own layer there"
                )
        self.out_features, self.in_features = self.weight.shape
        self.returns_bias = self.skip_bias_add
        self.adopt(recipe_of(self.config), name="")
        if self.tp_group.size() > 1 and not self.explicit_expert_comm:
            mesh = DeviceMesh.from_group(self.tp_group, self.weight.device.type)
            self.sharding = Sharding(mesh, split, *places)

    def forward(self, input_: Tensor, *more: Any, **others: Any) -> Any:  # type: ignore[override]  # Megatron's
        """(tokens, batch, in) -> (tokens, batch, out), and the bias if the caller adds it, else None."""
        if any(value is not None for value in (*more, *others.values())):
            raise NotImplementedError(f"ottava.doors.megatron: {self.name} takes its input only; got a weight, too")
        return super().forward(input_), self.bias if self.skip_bias_add else None


class OttavaColumnParallelLinear(ParallelLinear, ColumnParallelLinear):
    """Megatron's ColumnParallelLinear under a recipe, split by output features."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        ColumnParallelLinear.__init__(self, *args, **kwargs)
        ranks, weight = self.tp_group.size() > 1, self._parameters.get("weight")
        tokens = Shard(0) if self.sequence_parallel else Replicate()
        whole = {
            "gather_output": bool(self.gather_output and ranks),
            "disable_grad_reduce": bool(self.disable_grad_reduce and ranks),
            "skip_weight_param_allocation": weight is None,
        }
        self.take(0, (tokens, Shard(-1)), whole)


class OttavaRowParallelLinear(ParallelLinear, RowParallelLinear):
    """Megatron's RowParallelLinear under a recipe, split by input features."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        RowParallelLinear.__init__(self, *args, **kwargs)
        tokens = Shard(0) if self.sequence_parallel else Replicate()
        split_here = bool(not self.input_is_parallel and self.tp_group.size() > 1)
        self.take(1, (Shard(-1), tokens), {"input_is_parallel=False": split_here})


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
