"""Stores the weights of a model only in FP8, and gives them back: `convert(weights=...)`.

A parameter stays the same object for optimizers, tied modules and names (torch.utils.swap_tensors).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from ottava.base.errors import unknown_name
from ottava.engine.layer import QuantizedLayer
from ottava.nn.part import Part
from ottava.numerics.tensor import QuantizationSpec
from ottava.recipe import Recipe
from ottava.weights.checkpoint import keep_in_state_dict
from ottava.weights.operands import refuse_weight, stored_as
from ottava.weights.parameter import QuantizedWeight, quantized_weight, stored_spec

Weights = Literal["fp8", "bf16"]


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
    layers: dict[int, list[tuple[str, QuantizedLayer]]] = {}
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLayer):
            layers.setdefault(id(module.parameter), []).append((name, module))
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
    if weights not in (None, *get_args(Weights)):
        raise ValueError(f"convert: {unknown_name('weights', weights, get_args(Weights))}")
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
    parts = [layer for _, layer in held.layers if isinstance(layer, Part)]
    wanted = {layer.resolved.cells("weight")[0] for _, layer in held.layers}
    own = {id(layer) for _, layer in held.layers} | {id(module) for module, _ in held.owners if _holds(module, parts)}
    foreign = [type(module).__name__ for module, _ in held.owners if id(module) not in own]
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


def _holds(module: nn.Module, parts: list[Part]) -> bool:
    return any(part.held is module._parameters for part in parts)


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
