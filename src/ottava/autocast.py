"""Which recipe runs at this moment: the one ContextVar of ottava.

A recipe is run-time state, not a module type: each ottava Linear carries the recipe it was converted with, and
`autocast` overrules it for a while, in this thread or task only, nested as deep as you like. The forward of a layer
reads it once and hands it to its backward, which never looks here.

torch.compile cannot trace a ContextVar, and a constant in its place would go stale without a word. So `autocast` also
writes what it set into `_COMPILED_VIEW`, a plain object that Dynamo does guard on: entering or leaving it recompiles.
The price: compiled code sees what the thread says that entered or left an `autocast` last, whichever thread that is
(docs/design.md, decision 9).
"""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ottava.recipe import Recipe, get_recipe


@dataclass(frozen=True)
class Ambient:
    """What the innermost `autocast` says."""

    recipe: Recipe | None = None
    """For every layer; None leaves each layer its own."""
    enabled: bool = True
    """False: high precision everywhere."""

    def recipe_for(self, layer: str, own: Recipe) -> Recipe:
        """The recipe to run in the layer of that full name, whose own resolved recipe is `own`; no overrides left."""
        if not self.enabled:
            return _HIGH_PRECISION
        if self.recipe is None:
            return own
        if not self.recipe.overrides:
            return self.recipe
        if torch.compiler.is_compiling():
            return getattr(_COMPILED_VIEW, _view_name(self.recipe, layer))  # type: ignore[no-any-return]
        return self.recipe.for_layer(layer)


@torch.compiler.assume_constant_result  # Dynamo traces no fnmatch; both arguments are guarded on
def _view_name(recipe: Recipe, layer: str) -> str:
    """Puts the resolved recipe where Dynamo finds it as an attribute, the only kind of object it lets code ask."""
    name = f"{hash(recipe)}:{layer.replace('.', '/')}"  # Dynamo takes no dot in an attribute's name
    setattr(_COMPILED_VIEW, name, recipe.for_layer(layer))
    return name


_HIGH_PRECISION = get_recipe("bf16")
_NOTHING_SAID = Ambient()
_AMBIENT: contextvars.ContextVar[Ambient] = contextvars.ContextVar("ottava_autocast", default=_NOTHING_SAID)


class _CompiledView:
    """Where torch.compile's guards read the ambient recipe."""

    def __init__(self) -> None:
        self.ambient = _NOTHING_SAID


_COMPILED_VIEW = _CompiledView()


def ambient() -> Ambient:
    """What the innermost `autocast` of this thread or task says."""
    if torch.compiler.is_compiling():
        return _COMPILED_VIEW.ambient
    return _AMBIENT.get()


@functools.lru_cache(maxsize=256)
def _interned(recipe: Recipe) -> Recipe:
    """One object for all equal recipes: Dynamo guards on identity, and a recipe made anew each step would recompile."""
    return recipe


@contextmanager
def autocast(recipe: Recipe | str | None = None, *, enabled: bool = True) -> Iterator[None]:
    """Runs ottava layers under another recipe, or in high precision.

    Args:
        recipe: a Recipe or its name for every layer; None leaves each layer the one it was converted with.
        enabled: False runs every GEMM in high precision, to evaluate in BF16 without touching the model.
    Raises:
        ValueError: unknown recipe name.
    Edge cases: layers that were not converted do not listen. A backward uses the recipe of its forward, also where
        torch.utils.checkpoint recomputes it after the context has ended.

    Example:
        >>> import ottava
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64)).bfloat16()
        >>> report = ottava.convert(model, "tensorwise")
        >>> x = torch.randn(4, 64, dtype=torch.bfloat16)
        >>> with ottava.autocast(ottava.RECIPES["tensorwise"].override("0", wgrad=None)):
        ...     model(x).sum().backward()                  # one GEMM of one layer in BF16
        >>> with torch.no_grad(), ottava.autocast(enabled=False):
        ...     y = model(x)                               # BF16 evaluation
    """
    entered = Ambient(_interned(get_recipe(recipe)) if recipe is not None else None, enabled)
    token = _AMBIENT.set(entered)
    _COMPILED_VIEW.ambient = entered
    try:
        yield
    finally:
        _AMBIENT.reset(token)
        _COMPILED_VIEW.ambient = _AMBIENT.get()  # not what it was on entering: another thread may have left that since
