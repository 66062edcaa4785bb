"""Puts a model under a recipe, in place: its linear layers become ottava layers with the same Parameters.

It takes every nn.Linear, and the modules that `nn.foreign` knows: torch's attention, GPT-2's Conv1D, Hugging Face's
experts. Only the class of a module changes (`layer.__class__`), so names, hooks, tied weights, optimizers that already
hold the parameters and references to the layer all stay valid. The report names each layer that it did not convert,
with the reason: five projects have shipped FP8 flags that silently did nothing. It also names weights that code outside
of linear layers multiplies (`weights_outside`).

`convert(weights=...)` stores the weights of a model only in FP8, and gives them back; `model_init` makes models that
store them so from the beginning. A parameter stays the same object for optimizers, tied modules and names
(torch.utils.swap_tensors).
"""

from __future__ import annotations

import fnmatch
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize
from torch.nn.utils.parametrize import ParametrizationList

from ottava.base.errors import need, need_known, unknown_name
from ottava.base.text import grouped
from ottava.engine.functional import QuantizedLayer, quantized_layers
from ottava.engine.state import ScalingState
from ottava.nn.attention import DotProductAttention
from ottava.nn.foreign import TorchAttention, layers_of, parts_of, take, without_fused_layers
from ottava.nn.grouped import Stack
from ottava.nn.layer import LayerView, Linear, rows_of
from ottava.nn.plan import TOKENS, Device, Plan, plan_layer
from ottava.numerics.tensor import QuantizationSpec
from ottava.recipe import Recipe, default_filter, get_recipe
from ottava.weights.checkpoint import keep_in_state_dict
from ottava.weights.operands import refuse_weight, stored_as
from ottava.weights.parameter import QuantizedWeight, quantized_weight, stored_spec

Weights = Literal["fp8", "bf16"]
Filter = Callable[[str, nn.Linear], bool | str | None]
"""(full name, layer) -> True or None: convert it; False or a reason: do not. True also converts a head that is tied to
an embedding. A layer that is no nn.Linear comes as a `LayerView` with in_features, out_features, weight and bias."""


@dataclass(frozen=True)
class ConversionReport:
    """The result of `convert`: names of the converted layers, and a reason for each other layer.

    Example: see `convert`.
    """

    model: nn.Module
    """The model itself, changed in place."""
    recipe: Recipe
    """Its recipe."""
    converted: tuple[str, ...]
    """Full names."""
    skipped: Mapping[str, str]
    """Full name -> why not."""
    outside: Mapping[str, str]
    """Weights that code outside layers multiplies: full name of the parameter -> why no recipe reaches it."""
    unstored: Mapping[str, str] = field(default_factory=dict)
    """Under weights="fp8", parameters of ottava layers that are not stored in FP8: full name -> why not."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "recipe": self.recipe.to_dict(),
            "converted": list(self.converted),
            **{name: dict(getattr(self, name)) for name in ("skipped", "outside", "unstored")},
        }

    def __str__(self) -> str:
        total = len(self.converted) + len(self.skipped)
        lines = [f"{len(self.converted)} of {total} linear layers under recipe {self.recipe.name!r}"]
        lines += [f"  {name}: {reason}" for name, reason in self.skipped.items()]
        if self.outside:
            lines.append("multiplied outside layers, in high precision:")
            lines += [f"  {name}: {reason}" for name, reason in self.outside.items()]
        lines += stored_text(self.model, self.unstored)
        return "\n".join(lines)


def convert(
    model: nn.Module,
    recipe: Recipe | str = "tensorwise",
    *,
    filter: Filter | None = None,
    plan: int | bool | None = None,
    device: Device | None = None,
    weights: Weights | None = None,
    keep_high_precision: bool = False,
) -> ConversionReport:
    """Puts the linear layers of a model under a recipe, in place.

    Args:
        model: any module; may itself be an nn.Linear. Layers that are ottava's already get the new recipe. Beside
            nn.Linear it takes nn.MultiheadAttention (and so torch's encoder and decoder layers, whose fused operator
            for evaluation it switches off), the Conv1D of GPT-2, and the experts of transformers 5, each one a layer.
        recipe: a Recipe or its name; its overrides match full layer names.
        filter: (name, layer) -> True to convert, False or a reason not to. None takes `default_filter`; to extend that
            one, call it from yours.
        plan: tokens of one forward (batch x sequence on one GPU), True for 16,384. If `nn.plan` predicts that a layer
            is slower under the recipe than in BF16, `convert` leaves it alone. None or False: no prediction.
        device: constants of the device for that prediction; None takes an H200's.
        weights: "fp8" stores weights that the recipe casts only as codes (docs/weights.md), "bf16" gives them back.
        keep_high_precision: with "fp8", keep the numbers before the cast on the CPU, for an optimizer's master copy.
    Returns:
        ConversionReport; `.model` is the model.
    Raises:
        ValueError: unknown recipe, an override that matches no linear layer (the nearest name is given), or stored
            weights that the recipe casts in another way. The model is unchanged then.
        TypeError: the filter answered neither with a bool nor with a reason. The model is unchanged then.
    Warns: if a recipe quantizes and it converted no layer.
    Edge cases: a subclass that defines its own forward is not converted, and the report names it. The report also names
        weights that a module of another class multiplies (`ConversionReport.outside`). Routers stay in high precision.
        If a second call skips a layer, the layer keeps its recipe, so two calls can put two recipes on one model.

    Example:
        >>> import torch, ottava
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).bfloat16()
        >>> print(ottava.convert(model, "rowwise"))
        1 of 2 linear layers under recipe 'rowwise'
          2: 10 features on one side: below 32 a cast costs more than the GEMM saves
        >>> print(ottava.convert(model, "tensorwise", filter=lambda name, layer: True))
        2 of 2 linear layers under recipe 'tensorwise'
    """
    need("convert", model, nn.Module)
    recipe = get_recipe(recipe)
    foreign = {name: (module, parts) for name, module in model.named_modules() if (parts := parts_of(module))}
    layers = layers_of(model)
    attentions = {name: module for name, module in model.named_modules() if isinstance(module, DotProductAttention)}
    _check_patterns(recipe, {**layers, **attentions})
    tied = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    listening = {id(m.out_proj) for m in model.modules() if isinstance(m, TorchAttention)}
    listening |= {id(m.out_proj) for m, _ in foreign.values() if isinstance(m, nn.MultiheadAttention)}
    answers = {name: _refusal(name, one, tied, listening, filter or default_filter) for name, one in layers.items()}
    if plan is not None and plan is not False:
        tokens = TOKENS if plan is True else plan
        answers = {n: answer or _loss(n, layers[n], recipe, tokens, device) for n, answer in answers.items()}
    skipped = {name: _as_it_stays(layers[name], reason) for name, reason in answers.items() if reason is not None}
    converted = tuple(name for name in layers if name not in skipped)
    check_weights(recipe, {name: layers[name] for name in converted}, weights, keep_high_precision)
    for name, (module, parts) in foreign.items():  # only now: a filter that raises leaves the model unchanged
        if any(one == name or one.startswith(f"{name}." if name else "") for one in converted):
            take(module, parts)
    for name, part in model.named_modules():
        if isinstance(part, LayerView) and not hasattr(part, "recipe"):
            part.adopt(get_recipe("bf16"), name)  # its module runs it even before it is converted
    for name in (*converted, *attentions):
        layer: Any = model.get_submodule(name)
        ours = isinstance(layer, QuantizedLayer | DotProductAttention)
        (layer if ours else _as_linear(layer)).adopt(recipe, name)
    _name(layers, skipped)
    if converted:
        without_fused_layers(model)
        ScalingState(model)
    unstored = move_weights(model, weights, keep_high_precision=keep_high_precision)
    outside = {weight.name: weight.reason for weight in weights_outside(model)}
    report = ConversionReport(model, recipe, converted, skipped, outside, unstored)
    if recipe.quantized and not converted:
        warnings.warn(f"ottava.convert: nothing will run in FP8. {report}", stacklevel=2)
    return report


def plan_model(model: nn.Module, recipe: Recipe | str, *, tokens: int, device: Device | None = None) -> Plan:
    """Predicts every nn.Linear of a model, which may be on the meta device.

    Args:
        tokens: rows of the activations in one forward: batch x sequence on one GPU.
        device: None takes the constants of an H200.
    Raises:
        ValueError: unknown recipe, or tokens below 1.

    Example:
        >>> model = nn.Sequential(nn.Linear(4096, 14336), nn.Linear(14336, 64))
        >>> plan = plan_model(model, "delayed", tokens=16384)
        >>> [layer.taken for layer in plan.layers]
        [True, False]
    """
    need("plan_model", model, nn.Module)
    recipe, device = get_recipe(recipe), device or Device()
    plans = []
    for name, layer in layers_of(model).items():
        sizes = rows_of(layer, tokens), layer.in_features, layer.out_features
        stored = stored_as(getattr(layer, "parameter", layer.weight))
        plans.append(plan_layer(name, sizes, recipe, device, stored=stored))
    return Plan(recipe, tokens, device, tuple(plans))


def keep_first_last_bf16(recipe: Recipe | str, model: nn.Module, *, first: int = 1, last: int = 1) -> Recipe:
    """The recipe with the first and last blocks of a model in BF16, where FP8 usually hurts first.

    Blocks are the children of the longest nn.ModuleList or nn.Sequential that holds linear layers.

    Raises:
        ValueError: no such list, or fewer blocks than first + last.

    Example:
        >>> class Net(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layers = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(64, 64)}) for _ in range(4))
        >>> [o.pattern for o in keep_first_last_bf16("tensorwise", Net(), first=1, last=2).overrides]
        ['layers.0.*', 'layers.2.*', 'layers.3.*']
    """
    need("keep_first_last_bf16", model, nn.Module)
    recipe = get_recipe(recipe)
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential) and not isinstance(module, Stack) and layers_of(module)
    ]
    if not lists:
        raise ValueError("keep_first_last_bf16: the model has no nn.ModuleList of blocks; use recipe.override(pattern)")
    name, blocks = max(lists, key=lambda item: len(item[1]))
    if first < 0 or last < 0 or first + last > len(blocks):
        raise ValueError(f"keep_first_last_bf16: {name or 'the model'} has {len(blocks)} blocks; got {first} + {last}")
    prefix = f"{name}." if name else ""
    for index in (*range(first), *range(len(blocks) - last, len(blocks))):
        # a block may itself be a linear layer, without a dot behind its number
        inside = "" if isinstance(blocks[index], nn.Linear | QuantizedLayer) else ".*"
        recipe = recipe.override(f"{prefix}{index}{inside}", "bf16")
    return recipe


def _refusal(name: str, layer: Any, tied: set[int], listening: set[int], filter: Filter) -> str | None:
    ours = isinstance(layer, QuantizedLayer)
    if parametrize.is_parametrized(layer):
        return "parametrized: its weight is computed at every call, by a class of its own"
    if not ours and type(layer) is NonDynamicallyQuantizableLinear and id(layer) not in listening:
        return "read by an attention whose class has a forward of its own"
    if not ours and type(layer) not in (nn.Linear, NonDynamicallyQuantizableLinear):
        return f"{type(layer).__name__}: a subclass of nn.Linear with a forward of its own"
    if "forward" in vars(layer):
        return "its forward has been replaced on the instance: ottava's would never be called"
    if getattr(layer, "_distribute_module_applied", False):  # torch's mark of a layer that its styles have split
        from ottava.nn.sharding import refuse_split  # DTensor takes a second to import

        if reason := refuse_split(layer.weight):
            return reason
    if not layer.weight.is_floating_point():
        return f"weight is {layer.weight.dtype}"
    answer = filter(name, layer)
    if answer is not None and not isinstance(answer, bool | str):
        raise TypeError(f"convert: the filter answered {answer!r} for {name!r}; needs True, False, None or a reason")
    if isinstance(answer, str):
        return answer
    if answer is None and id(layer.parameter if ours else layer.weight) in tied:
        return "weight tied to an embedding"
    return "refused by the filter" if answer is False else None


def _as_linear(layer: nn.Module) -> Linear:
    """Makes an ottava layer of an nn.Linear; a layer that torch's tensor parallelism has split runs on its shard."""
    layer.__class__ = Linear
    assert isinstance(layer, Linear)
    if getattr(layer, "_distribute_module_applied", False):
        from ottava.nn.sharding import shard_by_torch

        shard_by_torch(layer)
    return layer


def _loss(name: str, layer: Any, recipe: Recipe, tokens: int, device: Device | None) -> str | None:
    """Why a layer would be slower under the recipe; None if it gains, or if the recipe casts nothing in it."""
    sizes = rows_of(layer, tokens), layer.in_features, layer.out_features
    predicted = plan_layer(name, sizes, recipe, device or Device())
    if predicted.taken or not recipe.for_layer(name).quantized:
        return None
    return f"predicted {predicted.speedup:.2f} x BF16, {predicted.reason}"


def _name(layers: Mapping[str, Any], skipped: Iterable[str]) -> None:
    """Layers of ours that stay under their own recipe get a name, too: overrides go by names."""
    for name in skipped:
        layer = layers[name]
        if isinstance(layer, QuantizedLayer) and not isinstance(layer, LayerView) and not layer.name:
            layer.adopt(layer.recipe, name)


def _as_it_stays(layer: Any, reason: str) -> str:
    # an earlier conversion is not undone, and must not be mistaken for high precision
    own = getattr(layer, "recipe", None)
    return f"{reason}; stays under recipe {own.name!r}" if isinstance(own, Recipe) else reason


def _check_patterns(recipe: Recipe, layers: Mapping[str, Any]) -> None:
    for override in recipe.overrides:
        if not any(fnmatch.fnmatchcase(name, override.pattern) for name in layers):
            raise ValueError(
                f"recipe {recipe.name!r}: no linear layer matches. {unknown_name('pattern', override.pattern, layers)}"
            )


# --- weights that convert cannot reach -------------------------------------------------------------------------------

_NO_GEMM = (
    nn.Linear,  # counted as a layer
    nn.Embedding,
    nn.EmbeddingBag,
    nn.LayerNorm,
    nn.RMSNorm,
    nn.GroupNorm,
    _NormBase,
    _ConvNd,  # no GEMM of two dimensions, and no recipe for it
    ParametrizationList,  # its module has the weight that is computed
)
_ADDED = re.compile(
    r"bias|embed|(^|_)(pos|position|positions|token|tokens|table|mask|query|queries|latents?|norm|scales?|gamma|beta|log|"
    r"mix|decay|state|cache)(_|\d|$)",
    re.IGNORECASE,
)
"""Words in the names of parameters that modules add, look up or multiply element by element."""


@dataclass(frozen=True)
class Outside:
    """A weight that no layer multiplies."""

    name: str
    """Full name of the parameter."""
    shape: tuple[int, ...]
    elements: int
    reason: str
    """Why no recipe reaches it."""


def weights_outside(model: nn.Module) -> Iterator[Outside]:
    """The weights of a model that other modules than nn.Linear multiply, each once, in the order of the model.

    A receipt that counts nn.Linear alone would call a model FP8 whose attention or experts run in high precision. No
    module declares which of its parameters it multiplies, so this is a judgement by shape, kind and name: matrices, and
    stacks of matrices, that belong neither to a linear layer nor to a lookup, a norm or a convolution.

    Edge cases: it leaves out convolutions, lookups, norms, parameters that are added by their name (pos_embed), weights
    that a linear layer or an embedding shares, and one-dimensional parameters (FSDP's flat ones), whose use is unknown.

    Example:
        >>> [(w.name, w.shape) for w in weights_outside(nn.MultiheadAttention(64, 2))]
        [('in_proj_weight', (192, 64))]
    """
    seen = {id(p) for m in model.modules() if isinstance(m, _NO_GEMM) for p in m.parameters(recurse=False)}
    seen |= {id(layer.parameter) for layer in quantized_layers(model)}
    for prefix, module in model.named_modules():
        if isinstance(module, _NO_GEMM) or "embedding" in type(module).__name__.lower():
            continue
        held = isinstance(module, nn.ParameterList | nn.ParameterDict)  # entries have no names of their own
        for own, parameter in module.named_parameters(recurse=False):
            label = f"{prefix.rpartition('.')[2]}_{own}" if held else own
            if id(parameter) in seen or is_lazy(parameter) or _ADDED.search(label) or not parameter.is_floating_point():
                continue
            shape = tuple(parameter.shape)
            if sum(size > 1 for size in shape) < 2 or len(shape) > 3:
                continue
            seen.add(id(parameter))
            name = f"{prefix}.{own}" if prefix else own
            yield Outside(name, shape, parameter.numel(), _reason(module, shape))


def _reason(module: nn.Module, shape: tuple[int, ...]) -> str:
    if "router" in type(module).__name__.lower():
        return "router: a rounding error changes which expert runs"
    stack = f"a stack of {shape[0]} matrices, " if len(shape) == 3 else ""
    return f"{stack}multiplied by {type(module).__name__} itself, a class that convert does not know"


# --- weights stored only as codes ------------------------------------------------------------------------------------


class Held(NamedTuple):
    """A parameter that layers multiply."""

    name: str
    """Full name."""
    parameter: Tensor
    owners: tuple[tuple[nn.Module, str], ...]
    """The modules that have it, and its name in each."""
    layers: tuple[tuple[str, QuantizedLayer], ...]
    """The layers that multiply it or a part of it."""


def held_weights(model: nn.Module) -> list[Held]:
    """The parameters of a model that ottava layers multiply, each once, in the order of the model."""
    modules = dict(model.named_modules())
    layers = grouped((id(m.parameter), (name, m)) for name, m in modules.items() if isinstance(m, QuantizedLayer))
    found: dict[int, list[tuple[str, nn.Module, str]]] = {}
    for prefix, module in model.named_modules():
        for own, parameter in module._parameters.items():
            if id(parameter) in layers:
                found.setdefault(id(parameter), []).append((f"{prefix}.{own}" if prefix else own, module, own))
    return [
        Held(places[0][0], places[0][1]._parameters[places[0][2]], tuple(p[1:] for p in places), tuple(layers[key]))  # type: ignore[arg-type]
        for key, places in found.items()
    ]


def check_weights(
    recipe: Recipe, layers: Mapping[str, nn.Module | None], weights: Weights | None, kept: bool = False
) -> None:
    """Raises, before any change, if one set of codes cannot serve both casts of a layer's weight: codes that are to be
    made, or those that the layer stores already.

    Args:
        layers: by their full names; None: not made yet.
    Raises:
        ValueError: which layer, why, and what to choose; an unknown word for the weights; or high precision is to be
            kept beside weights that are not stored.
    """
    need_known("convert", "weights", weights, (None, *get_args(Weights)))
    if kept and weights != "fp8":
        raise ValueError(f"convert: keep_high_precision is for weights='fp8'; got weights={weights!r}")
    for name, layer in layers.items() if weights != "bf16" else ():
        resolved = recipe.for_layer(name)
        row, col = resolved.cells("weight")
        own = layer.parameter if isinstance(layer, QuantizedLayer) else None
        if own is not None and (stored := stored_as(own)):
            reason = refuse_weight(stored, row, col)
            if reason and (weights is None or getattr(own, "high_precision", None) is None):
                raise ValueError(
                    f"convert: the weight of {name or 'the layer'!r} cannot go under recipe {resolved.name!r}: "
                    f"{reason}. Choose a recipe whose weight cell is {stored}, load the weights again, or keep their "
                    "numbers: convert(..., weights='fp8', keep_high_precision=True)"
                )
        elif weights == "fp8" and row is not None and (reason := refuse_weight(None, row, col)):
            raise ValueError(
                f"convert: recipe {resolved.name!r} has no FP8 weights for {name or 'the layer'!r}: {reason}. Give W "
                "and W.T scales that they share ('tensorwise', 'blockwise', 'delayed') or powers of two ('mxfp8', "
                "'rowwise')"
            )


def move_weights(model: nn.Module, weights: Weights | None, *, keep_high_precision: bool = False) -> dict[str, str]:
    """Stores the weights of ottava layers only as codes, where their recipe casts them, or gives them back.

    Returns:
        full name of each parameter that is not stored in FP8 -> why.
    Raises:
        ValueError: codes would have to be rounded to other codes.  RuntimeError: a graph of a backward holds one.
    """
    stays: dict[str, str] = {}
    if weights == "bf16":
        give_back(model)
    for held in held_weights(model) if weights == "fp8" else ():
        spec, reason = _spec_of(held)
        if spec is None:
            stays[held.name] = reason
            continue
        values = held.parameter
        if isinstance(values, QuantizedWeight):
            if values.spec == spec:
                continue
            assert values.high_precision is not None  # `check_weights` has seen to it
            values = values.high_precision.to(values.device)
        weight = quantized_weight(values, spec, keep_high_precision=keep_high_precision)
        put_weight(held.name, held.parameter, weight, requires_grad=held.parameter.requires_grad)
        for module, name in held.owners:
            keep_in_state_dict(module, name)
    return stays


def give_back(model: nn.Module) -> None:
    """The weights of ottava layers as plain parameters again: their numbers before the cast where these were kept,
    else what the codes stand for."""
    for held in held_weights(model):
        if isinstance(weight := held.parameter, QuantizedWeight):
            kept = weight.high_precision
            values = weight.detach().dequantize() if kept is None else kept.to(weight.device, weight.dtype)
            put_weight(held.name, weight, values, requires_grad=weight.requires_grad)


def stored_text(model: nn.Module, unstored: Mapping[str, str]) -> list[str]:
    """Lines of a report on the weights that are stored in FP8, and on the others; none without weights="fp8"."""
    held = [one.parameter for one in held_weights(model)]
    own = [weight for weight in held if isinstance(weight, QuantizedWeight)]
    lines = [f"  {name}: {reason}" for name, reason in unstored.items()]
    if own or lines:
        whole = sum(weight.numel() * weight.element_size() for weight in own)
        lines.insert(0, f"{len(own)} of {len(held)} weights in FP8: {sum(w.nbytes for w in own):,} of {whole:,} bytes")
    return lines


def _spec_of(held: Held) -> tuple[QuantizationSpec | None, str]:
    """(the spec to store a parameter with, ""), or (None, the reason not to)."""
    parts = [layer for _, layer in held.layers if isinstance(layer, LayerView)]
    own, holders = {id(layer) for _, layer in held.layers}, {id(part.held) for part in parts}
    wanted = {layer.resolved.cells("weight")[0] for _, layer in held.layers}
    others = (module for module, _ in held.owners if id(module) not in own and id(module._parameters) not in holders)
    foreign = [type(module).__name__ for module in others]
    if hasattr(held.parameter, "device_mesh"):
        return None, "sharded already: convert first, then shard"
    if foreign:
        return None, f"also held by {foreign[0]}"
    if len(wanted) > 1:
        return None, "its layers run recipes that cast it in different ways"
    spec = wanted.pop()
    if spec is None:
        return None, "the recipe keeps it in high precision"
    if any(isinstance(part.piece, slice) for part in parts):
        return None, "its layers multiply some of its rows"
    if any(getattr(layer, "turned", False) for _, layer in held.layers):
        return None, "kept as (in, out): blocks of codes lie along its other side"
    return stored_spec(spec), ""


def put_weight(name: str, old: Tensor, weight: Tensor, *, requires_grad: bool) -> None:
    """Gives a parameter other memory; it stays the object that it was.

    Raises:
        RuntimeError: another object still needs its memory.
    """
    new, grad = nn.Parameter(weight, requires_grad), old.grad
    try:
        torch.utils.swap_tensors(old, new)
    except RuntimeError as error:
        raise RuntimeError(
            f"{name}: something refers to this tensor, such as compiled code or the graph of a loss: convert before "
            f"torch.compile and before the first forward ({error})"
        ) from error
    old.grad = grad if requires_grad else None


@contextmanager
def model_init(recipe: Recipe | str = "tensorwise", *, keep_high_precision: bool = False) -> Iterator[None]:
    """Gives linear layers that are made inside FP8 weights at once, so that the whole model never exists in BF16.

    Args:
        recipe: a Recipe or its name, without overrides: full names are not known while a model is being made.
        keep_high_precision: keep the initial numbers on the CPU, for the master copy of an optimizer.
    Raises:
        ValueError: overrides, or a recipe that has no FP8 weights (`convert`).
    Edge cases: it converts a module as soon as the module becomes the child of another, and the rest at the end.
        Under torch.device("meta") no number exists: `model.to_empty(device=...)` gives memory, and loading or
        `reset_parameters` numbers, which are then cast. Of nested contexts the inner one decides about what is made in
        it. Not for several threads at once.

    Example:
        >>> import torch, ottava
        >>> with ottava.model_init("tensorwise"):
        ...     model = nn.Sequential(nn.Linear(64, 64, dtype=torch.bfloat16), nn.ReLU())
        >>> model[0].weight
        QuantizedWeight((64, 64), E4M3[tensor], torch.bfloat16, device='cpu')
    """
    recipe = get_recipe(recipe)
    if recipe.overrides:
        raise ValueError(
            f"model_init: recipe {recipe.name!r} has overrides, and full names of layers are not known while the model "
            "is made. Make it under torch.device('meta') and call ottava.convert(model, recipe, weights='fp8')"
        )
    check_weights(recipe, {"": None}, "fp8")
    maker = _Maker(recipe, keep_high_precision)
    register = register_module_parameter_registration_hook
    with register_module_module_registration_hook(maker) as handle, register(maker):
        hooks: Any = handle.hooks_dict_ref()
        maker.active = lambda: [hook for hook in hooks.values() if isinstance(hook, _Maker)]
        yield
    maker.finish()


class _Maker:
    """What one `model_init` does with the modules that are made in it; torch calls it for each new child."""

    def __init__(self, recipe: Recipe, keep_high_precision: bool) -> None:
        self.recipe, self.keep = recipe, keep_high_precision
        self.roots: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()  # a module that nobody keeps leaves it
        self.made: WeakSet[nn.Module] = WeakSet()  # layers that are done, also by contexts inside this one
        self.inner: WeakSet[nn.Module] = WeakSet()  # of these, those of contexts inside
        self.active: Callable[[], list[_Maker]] = list

    def __call__(self, module: nn.Module, name: str, child: Any) -> None:
        if self.active()[-1] is not self:  # a context inside this one makes it
            return
        self.roots[id(module)] = module
        if not isinstance(child, nn.Module):
            return
        self.roots.pop(id(child), None)
        own = {full: layer for full, layer in layers_of(child).items() if layer not in self.inner}
        whole = [
            full for full, layer in own.items() if isinstance(layer, LayerView) or not full
        ]  # no module of its own
        if whole and all(default_filter(f"{name}.{full}" if full else name, own[full]) is None for full in whole):
            self._convert(child)

    def finish(self) -> None:
        """Converts what is left; a context around this one leaves it alone."""
        for root in list(self.roots.values()):
            if any(layer not in self.inner for layer in layers_of(root).values()):
                self._convert(root)
        if outer := self.active():
            outer[-1].inner |= self.made | self.inner

    def _convert(self, module: nn.Module) -> None:
        def chosen(name: str, layer: nn.Linear) -> str | None:
            return "made under another model_init" if layer in self.inner else default_filter(name, layer)

        convert(module, self.recipe, filter=chosen, weights="fp8", keep_high_precision=self.keep)
        self.made.update(layers_of(module).values())
