"""Finds the operands of a layer's GEMMs by the name of its class, without importing any framework.

A layer is a call with an input, weights and an output. For each class, `ADAPTERS` says which of them are the operands
X (M, K), W (N, K) and the result Y (M, N), and why some cannot be seen from outside. A new class is one entry.

What a layer casts is read from its own configuration: `recipe_of`, `casting`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ottava.engine.functional import QuantizedLayer
from ottava.numerics.formats import E4M3, E5M2
from ottava.numerics.scaling import PER_ROW, PER_TENSOR, ScaleFormat
from ottava.numerics.tensor import QuantizationSpec
from ottava.recipe import ATTENTION_TENSORS, CELL_OF, GEMMS, RECIPES, TENSORS, GemmRecipe, Recipe, get_recipe


class Part(NamedTuple):
    """One linear of a call."""

    suffix: str = ""
    """Added to the layer's name."""
    inputs: tuple[Tensor, ...] = ()
    """(..., K) each; several if the layer multiplies several tensors by this weight."""
    weight: Tensor | None = None
    """The stored weight, see `Adapter.transposed`."""
    output: Tensor | None = None
    """(..., N)."""
    arrange: Callable[[Tensor], Tensor] | None = None
    """From a tensor like output to the part that this linear computed, in the order of its rows."""
    arrange_input: Callable[[Tensor], Tensor] | None = None
    """From a tensor like one of inputs to X, if X is a part of it."""
    arrange_weight: Callable[[Tensor], Tensor] | None = None
    """From a tensor like weight to W (N, K), if `Adapter.transposed` is not enough."""
    cast: bool = True
    """Whether torch.autocast changes the dtype of the operands."""


Call = Callable[[Any, tuple[Any, ...], Mapping[str, Any], Any], Iterator[Part]]
"""(module, args, kwargs, output) -> the linears of the call."""
Weights = Callable[[Any], Iterator[tuple[str, Tensor]]]
"""module -> (suffix, weight) of each linear."""


@dataclass(frozen=True)
class Adapter:
    """How to read the layers of a class."""

    call: Call
    weights: Weights
    package: str = ""
    """Beginning of the package's name; needed if classes of other packages have the same name."""
    transposed: bool = False
    """Whether the layer stores the weight as (K, N)."""
    why: str = ""
    """The tensors that the watch cannot see, and the reason."""


def tensors_of(value: Any) -> Iterator[Tensor]:
    """The tensors of an argument or result: itself, or the entries of a tuple, list or mapping."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from (item for item in value.values() if isinstance(item, Tensor))
    elif isinstance(value, (tuple, list)):
        yield from (item for item in value if isinstance(item, Tensor))


def _first(*values: Any) -> Tensor | None:
    return next((tensor for value in values for tensor in tensors_of(value)), None)


def stored(module: Any, name: str = "weight") -> Any:
    """A parameter of a module; None if it has none, or if torch's parametrize computes it: reading it would draw random
    numbers once more, or move the vectors of a spectral norm."""
    computed = module._modules.get("parametrizations")
    return None if computed is not None and name in computed._modules else getattr(module, name, None)


def _one(module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> Iterator[Part]:
    """X is the first tensor of the arguments, W is `weight`, Y is the first tensor of the result."""
    x = _first(args, kwargs)
    weight = kwargs.get("weight")  # Megatron's tied output layer gets it as an argument
    weight = weight if isinstance(weight, Tensor) else stored(module)
    yield Part("", () if x is None else (x,), weight, _first(output))


def _one_weight(module: Any) -> Iterator[tuple[str, Tensor]]:
    yield "", _or_empty(stored(module))  # none: it comes with the call, or is computed in it


def _produced(module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> Iterator[Part]:
    """X is the result of the layer's norm or activation: computed again where it is wanted, unless the layer returns
    it."""
    if isinstance(output, tuple):
        yield Part("", output[1:], module.weight, output[0])
        return

    def again(x: Tensor) -> Tensor:
        with torch.no_grad():
            made: Tensor = module.rows(x)
        return made

    yield Part("", tuple(x.detach() for x in tensors_of(args)), module.weight, output, arrange_input=again)


def _normed(module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> Iterator[Part]:
    """The norm is inside the layer: the watch sees W and Y only."""
    yield Part("", (), stored(module), _first(output))


def _headed(module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> Iterator[Part]:
    """The output is a loss: the watch sees only X and W."""
    yield Part("", (args[0],) if args else (), stored(module))


def _mlp(module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> Iterator[Part]:
    yield Part(".fc1", (), module.fc1_weight)
    yield Part(".fc2", (), module.fc2_weight, _first(output))


def _mlp_weights(module: Any) -> Iterator[tuple[str, Tensor]]:
    yield ".fc1", module.fc1_weight
    yield ".fc2", module.fc2_weight


def _grouped(module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> Iterator[Part]:
    """Each weight multiplies some rows of one input."""
    x, y = _first(args, kwargs), _first(output)
    splits = kwargs.get("m_splits", args[1] if len(args) > 1 else None)
    if isinstance(splits, Tensor):
        splits = splits.tolist() if splits.device.type == "cpu" else None  # reading it would wait for a GPU
    weights = list(_grouped_weights(module))
    fits = isinstance(splits, (list, tuple)) and len(splits) == len(weights)
    start = 0
    for index, (suffix, weight) in enumerate(weights):
        if not fits or x is None:
            yield Part(suffix, (), weight)
            continue
        take = partial(_rows, start=start, stop=start + int(splits[index]))
        yield Part(suffix, (take(x.detach()),), weight, y, take)
        start += int(splits[index])


def _rows(x: Tensor, start: int, stop: int) -> Tensor:
    return x.reshape(-1, x.shape[-1])[start:stop]


def _grouped_weights(module: Any) -> Iterator[tuple[str, Tensor]]:
    for index in range(module.num_gemms):
        yield f".{index}", getattr(module, f"weight{index}")


def _attention(module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> Iterator[Part]:
    """nn.MultiheadAttention: X and W of the input projections, W and Y of the output projection."""
    named = {**dict(zip(("query", "key", "value"), args, strict=False)), **kwargs}
    given = [named[name] for name in ("query", "key", "value") if isinstance(named.get(name), Tensor)]
    y = _first(output)

    def ordered(x: Tensor) -> Tensor:
        # inside, the rows are always (time, batch)
        return x.detach().transpose(0, 1) if x.dim() == 3 else x.detach()

    arrange = ordered if module.batch_first else torch.Tensor.detach
    different = [x for i, x in enumerate(given) if all(x is not earlier for earlier in given[:i])]
    if module._qkv_same_embed_dim:
        yield Part(".in_proj", tuple(arrange(x) for x in different), stored(module, "in_proj_weight"))
    else:
        for name, x in zip("qkv", given, strict=False):
            yield Part(f".{name}_proj", (arrange(x),), stored(module, f"{name}_proj_weight"))
    yield Part(".out_proj", (), stored(module.out_proj), y, arrange)


def _attention_weights(module: Any) -> Iterator[tuple[str, Tensor]]:
    names = ("in_proj",) if module._qkv_same_embed_dim else tuple(f"{name}_proj" for name in "qkv")
    for name in names:
        yield f".{name}", _or_empty(stored(module, f"{name}_weight"))
    yield ".out_proj", _or_empty(stored(module.out_proj))


def _or_empty(weight: Any) -> Tensor:
    return weight if isinstance(weight, Tensor) and not is_lazy(weight) else torch.empty(0, 0)


_TE = "transformer_engine"
_FUSED_NORM = "X: the norm is fused into the layer, so the input of its GEMM cannot be seen from outside"
_PLAIN = Adapter(_one, _one_weight)
ADAPTERS: Mapping[str, tuple[Adapter, ...]] = MappingProxyType(
    {
        "Linear": (Adapter(_one, _one_weight, "torch.nn."), Adapter(_one, _one_weight, _TE)),
        "MultiheadAttention": (
            Adapter(
                _attention,
                _attention_weights,
                "torch.nn.",
                why="dY of in_proj, X of out_proj: they are inside torch's attention function, which calls no module",
            ),
        ),
        "Conv1D": (Adapter(_one, _one_weight, transposed=True),),  # Hugging Face's GPT-2
        "Float8Linear": (_PLAIN,),  # torchao
        "ColumnParallelLinear": (_PLAIN,),  # Megatron returns (y, bias), fairscale y
        "RowParallelLinear": (_PLAIN,),
        # under a recipe that casts nothing; else their doors tell
        "NormLinear": (Adapter(_produced, _one_weight, "ottava."),),
        "ActivatedLinear": (Adapter(_produced, _one_weight, "ottava."),),
        "LinearCrossEntropy": (Adapter(_headed, _one_weight, "ottava.", why="Y, dY: its loss is inside the layer"),),
        "LayerNormLinear": (Adapter(_normed, _one_weight, _TE, why=_FUSED_NORM),),
        "LayerNormMLP": (Adapter(_mlp, _mlp_weights, _TE, why=f"{_FUSED_NORM}; nor the tensors between fc1 and fc2"),),
        "GroupedLinear": (Adapter(_grouped, _grouped_weights, _TE),),
    }
)
"""Class name -> adapters of the classes with this name, one for each package."""


def adapter_of(module: nn.Module) -> Adapter | None:
    """The adapter of a layer's class, or of the nearest base class that has one.

    Example:
        >>> class MyLinear(nn.Linear):
        ...     pass
        >>> adapter_of(MyLinear(2, 2)) is ADAPTERS["Linear"][0], adapter_of(nn.ReLU())
        (True, None)
    """
    for kind in type(module).__mro__:
        for adapter in ADAPTERS.get(kind.__name__, ()):
            if kind.__module__.startswith(adapter.package):
                return adapter
    return None


_CASTERS = ("ottava", "torchao", "transformer_engine")
_TE_RECIPES = MappingProxyType(
    {
        "DelayedScaling": "delayed",
        "Float8CurrentScaling": "tensorwise",
        "Float8BlockScaling": "blockwise",
        "MXFP8BlockScaling": "mxfp8",
        "NVFP4BlockScaling": "nvfp4",
    }
)
"""Class of TransformerEngine's recipe -> ours with the same casts, for its format HYBRID or its only one."""


def recipe_of(layer: nn.Module) -> Recipe | None:
    """The recipe that a layer of another package casts by, read from its own configuration; None if it casts nothing.

    Example:
        >>> recipe_of(nn.Linear(2, 2)) is None
        True
    """
    for kind in type(layer).__mro__:
        package = kind.__module__.partition(".")[0]
        if package == "torchao" and kind.__name__ == "Float8Linear":
            return _of_torchao(getattr(layer, "config", None))
        if package == "transformer_engine" and getattr(layer, "fp8", False) is True:
            return _of_te(getattr(layer, "fp8_meta", {}).get("recipe"))
    return None


def casting(layer: nn.Module | None, recipe: Recipe | None) -> dict[str, Any]:
    """Facts of a layer for the manifest: its package, its recipe, and the cast of each tensor.

    Example:
        >>> facts = casting(nn.Linear(2, 2), get_recipe("rowwise_with_gw_hp"))
        >>> facts["casts"]["input"]
        {'format': 'E4M3', 'granularity': 'row', 'scale_format': 'pow2', 'scaling': 'current', 'gemms': ['fprop']}
    """
    packages = [kind.__module__.partition(".")[0] for kind in type(layer).__mro__]
    package = next((name for name in packages if name in _CASTERS), "torch")
    casts = {}
    if recipe is not None and package == "ottava" and not isinstance(layer, QuantizedLayer):  # attention
        specs = {tensor: getattr(recipe.attention, tensor, None) for tensor in ATTENTION_TENSORS}
        casts = {tensor: _facts_of(spec) for tensor, spec in specs.items() if spec is not None}
    elif recipe is not None:
        casts = {tensor: cast for tensor in TENSORS if (cast := _cast(recipe, tensor))}
    name = recipe.name if recipe is not None and (casts or package == "ottava") else ""
    return {"package": package, "recipe": name, "casts": casts}


def _cast(recipe: Recipe, tensor: str) -> dict[str, Any]:
    cells = {CELL_OF[tensor, d][0]: spec for d, spec in zip(("row", "col"), recipe.cells(tensor), strict=True)}
    spec = next((spec for spec in cells.values() if spec is not None), None)
    if spec is None:
        return {}
    return {**_facts_of(spec), "gemms": [gemm for gemm in GEMMS if cells.get(gemm) is not None]}


def _facts_of(spec: QuantizationSpec) -> dict[str, Any]:
    how = {"scale_format": str(spec.scale_format), "scaling": str(spec.scaling)}
    return {"format": spec.format.name, "granularity": str(spec.granularity), **how}


def _of_torchao(config: Any) -> Recipe | None:
    """The recipe of a Float8LinearConfig: one of ours if the casts are the same, else one with a name of its own."""
    if config is None:
        return None
    scale: ScaleFormat = "pow2" if config.round_scales_to_power_of_2 else "fp32"

    def spec(name: str) -> QuantizationSpec | None:
        cast = getattr(config, f"cast_config_{name}")
        if cast.scaling_type.name == "DISABLED":
            return None
        rows = PER_ROW if cast.scaling_granularity.name == "AXISWISE" else PER_TENSOR
        return QuantizationSpec(E5M2 if "e5m2" in str(cast.target_dtype) else E4M3, rows, scale_format=scale)

    cells = {
        "fprop": (spec("input"), spec("weight")),
        "dgrad": (spec("grad_output"), spec("weight_for_grad_input")),
        "wgrad": (spec("grad_output_for_grad_weight"), spec("input_for_grad_weight")),
    }
    for known in RECIPES.values():
        if all((getattr(known, gemm).lhs, getattr(known, gemm).rhs) == pair for gemm, pair in cells.items()):
            return known if known.casts else None
    fprop, dgrad, wgrad = (GemmRecipe(*cells[gemm]) for gemm in GEMMS)
    return Recipe("torchao", fprop, dgrad, wgrad)


def _of_te(recipe: Any) -> Recipe | None:
    name = _TE_RECIPES.get(type(recipe).__name__)
    if name is None:
        return None
    if name == "delayed":
        how = {"amax_history_len": recipe.amax_history_len, "margin": recipe.margin}
        return get_recipe(name, **how)
    return get_recipe("tensorwise_e4m3" if name == "tensorwise" and "HYBRID" not in str(recipe.fp8_format) else name)
