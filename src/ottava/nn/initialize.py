"""`model_init`: models that store their weights in FP8 from the beginning."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from ottava.nn.convert import convert, default_filter
from ottava.nn.foreign import layers_of
from ottava.nn.part import Part
from ottava.nn.weights import check_weights
from ottava.recipe import Recipe, get_recipe


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
        `reset_parameters` numbers, which are then cast. Not for several threads at once.

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
    check_weights(recipe, [""], "fp8")
    roots: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()  # weak: modules that the caller drops are freed

    def made(module: nn.Module, name: str, child: Any) -> None:
        roots[id(module)] = module
        if not isinstance(child, nn.Module):
            return
        roots.pop(id(child), None)
        own = layers_of(child)
        whole = [full for full, layer in own.items() if isinstance(layer, Part) or not full]  # no module of its own
        if whole and all(default_filter(f"{name}.{full}" if full else name, own[full]) is None for full in whole):
            convert(child, recipe, weights="fp8", keep_high_precision=keep_high_precision)

    hooks = register_module_module_registration_hook(made), register_module_parameter_registration_hook(made)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    for root in list(roots.values()):
        if layers_of(root):
            convert(root, recipe, weights="fp8", keep_high_precision=keep_high_precision)
