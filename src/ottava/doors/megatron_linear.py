"""Megatron Core's parallel linears under the recipe that Megatron's own FP8 arguments name.

The linears keep Megatron's parameters, initial values, checkpoints and process groups. Split layers run as those of
`ottava.distributed` do: ranks agree on scales, and codes travel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from ottava.base.errors import unknown_name
from ottava.compat.transformer_engine.common import recipe as te
from ottava.doors.host import need_host
from ottava.nn.layer import Layer
from ottava.nn.sharding import Sharding
from ottava.recipe import HIGH_PRECISION, Recipe, get_recipe

need_host("megatron")

from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear  # noqa: E402  # after the check

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
