"""Puts a model under a recipe, in place: its linear layers become ottava layers with the same Parameters.

It takes every nn.Linear, and the modules that `nn.foreign` knows: torch's attention, GPT-2's Conv1D, Hugging Face's
experts. Only the class of a module changes (`layer.__class__`), so names, hooks, tied weights, optimizers that already
hold the parameters and references to the layer all stay valid. The report names each layer that it did not convert,
with the reason: five projects have shipped FP8 flags that silently did nothing.
"""

from __future__ import annotations

import fnmatch
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils import parametrize

from ottava.base.errors import need, unknown_name
from ottava.engine.layer import QuantizedLayer
from ottava.engine.state import ScalingState
from ottava.nn.attention import DotProductAttention
from ottava.nn.foreign import layers_of, parts_of, take
from ottava.nn.grouped import Stack
from ottava.nn.linear import Linear
from ottava.nn.outside import weights_outside
from ottava.nn.part import Part, rows_of
from ottava.nn.plan import TOKENS, Device, plan_layer
from ottava.nn.torch_attention import MultiheadAttention, without_fused_layers
from ottava.nn.weights import Weights, check_weights, move_weights, stored_text
from ottava.recipe import Recipe, get_recipe

Filter = Callable[[str, nn.Linear], bool | str | None]
"""(full name, layer) -> True or None: convert it; False or a reason: do not. True also converts a head that is tied to
an embedding. A layer that is no nn.Linear comes as a `nn.part.Part` with in_features, out_features, weight and bias."""

HEADS = ("lm_head", "output", "head", "embed_out", "output_projection", "score", "classifier", "qa_outputs")
_ROUTERS = ("router", "gate", "gating", "shared_expert_gate")
_SMALLEST = 32


@dataclass(frozen=True)
class ConversionReport:
    """The result of `convert`: names of the converted layers, and a reason for each other layer."""

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
            "skipped": dict(self.skipped),
            "outside": dict(self.outside),
            "unstored": dict(self.unstored),
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
    listening = {id(m.out_proj) for m in model.modules() if isinstance(m, MultiheadAttention)}
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
        if isinstance(part, Part) and not hasattr(part, "recipe"):
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


def default_filter(name: str, layer: nn.Linear) -> str | None:
    """Why a layer should stay in high precision, or None: output heads, LoRA adapters, routers, tiny layers.

    Heads and routers decide by small differences of large sums and are a small share of the work; adapters are small,
    and the training changes nothing else.

    Example:
        >>> default_filter("model.lm_head", nn.Linear(64, 512)), default_filter("mlp.gate_proj", nn.Linear(64, 256))
        ('output head: sensitive, and its input feeds the loss directly', None)
    """
    parts = name.split(".")
    if parts[-1] in HEADS:
        return "output head: sensitive, and its input feeds the loss directly"
    if any(part.startswith("lora_") for part in parts):
        return "LoRA adapter: small, and all that is being trained"
    if parts[-1] in _ROUTERS:
        return "router: a rounding error changes which expert runs"
    smallest = min(layer.in_features, layer.out_features)
    if smallest < _SMALLEST:
        return f"{smallest} features on one side: below {_SMALLEST} a cast costs more than the GEMM saves"
    return None


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
    if getattr(layer, "_distribute_module_applied", False) and (reason := _unsplit(layer)):  # torch's mark
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


def _unsplit(layer: Any) -> str | None:
    """Why a layer that torch's tensor parallelism has split cannot run on its shard; None if it can."""
    from ottava.nn.sharding import refuse_split  # DTensor takes a second to import

    return refuse_split(layer.weight)


def _loss(name: str, layer: Any, recipe: Recipe, tokens: int, device: Device | None) -> str | None:
    """Why a layer would be slower under the recipe; None if it gains, or if the recipe casts nothing in it."""
    sizes = rows_of(layer, tokens), layer.in_features, layer.out_features
    predicted = plan_layer(name, sizes, recipe, device or Device())
    asked = recipe.for_layer(name)
    if predicted.taken or not (asked.fprop.quantized or asked.dgrad.quantized or asked.wgrad.quantized):
        return None
    return f"predicted {predicted.speedup:.2f} x BF16, {predicted.reason}"


def _name(layers: Mapping[str, Any], skipped: Iterable[str]) -> None:
    """Layers of ours that stay under their own recipe get a name, too: overrides go by names."""
    for name in skipped:
        layer = layers[name]
        if isinstance(layer, QuantizedLayer) and not isinstance(layer, Part) and not layer.name:
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
