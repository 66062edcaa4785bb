"""`model_init`: models that store their weights in FP8 from the beginning."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet, WeakValueDictionary

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
    handles = (
        register_module_module_registration_hook(maker),
        register_module_parameter_registration_hook(maker),
    )
    hooks: Any = handles[0].hooks_dict_ref()
    maker.active = lambda: [hook for hook in hooks.values() if isinstance(hook, _Maker)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
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
        whole = [full for full, layer in own.items() if isinstance(layer, Part) or not full]  # no module of its own
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
