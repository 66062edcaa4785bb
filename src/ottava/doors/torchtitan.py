"""torchtitan: overrides that put the linears of a model config under a recipe, for `--override.imports`.

    --override.imports 'ottava.doors.torchtitan.model={"recipe": "mxfp8", "skip": ["layers.0.*"]}'
    --override.imports 'ottava.doors.torchtitan.linear={"recipe": "mxfp8"}'

`model` judges every linear by its name, as `ottava.convert` does. torchtitan refuses two overrides of which one lies
inside the other; beside overrides of other parts of a block take `linear`, which claims the linears of blocks alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any

from ottava.doors.host import need_host, without
from ottava.engine.quantizer import LinearQuantizers, Quantizer, WeightQuantizer
from ottava.nn.layer import Layer
from ottava.recipe import Recipe, default_filter, get_recipe

need_host("torchtitan")

from torchtitan.config.override import derive, override  # noqa: E402  # after the check
from torchtitan.models.common.linear import Linear  # noqa: E402
from torchtitan.protocols.model import BaseModel  # noqa: E402
from torchtitan.protocols.module import Module  # noqa: E402

_LOG = logging.getLogger(__name__)


class _Input(Quantizer, Module):  # torchtitan checks that every module of a model is its Module
    pass


class _Weight(WeightQuantizer, Module):
    pass


class _Doors(LinearQuantizers, Module):
    pass


_THEIRS: Mapping[type, type] = MappingProxyType({Quantizer: _Input, WeightQuantizer: _Weight, LinearQuantizers: _Doors})


class OttavaLinear(Layer, Linear):
    """torchtitan's Linear under a recipe: same parameters, same initial values, same keys."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        """torchtitan's, and the recipe (its name or `to_dict()`) with the name of the layer."""

        recipe: Any = "tensorwise"
        name: str = ""

    def __init__(self, config: Config) -> None:
        Linear.__init__(self, config)
        self.adopt(_recipe(config.recipe), config.name)
        for door in self.quantizers.modules():
            door.__class__ = _THEIRS[type(door)]


@override(target=BaseModel.Config, description="ottava: linears under an FP8 recipe, chosen by name")
def model(cfg: Any, recipe: Any = "tensorwise", skip: Sequence[str] = ()) -> Any:
    """Replaces the configs of a model's linears in place.

    Args:
        recipe: a name, or a recipe's `to_dict()`.
        skip: shell patterns of names that stay in BF16, beside heads, routers and tiny layers.
    Raises:
        ValueError: an unknown recipe, a pattern that matches no linear, or a model without a linear to convert.
    """
    _recipe(recipe)
    linears = {name: (found, parent, field) for name, found, parent, field in cfg.traverse(Linear.Config)}
    chosen, done = without("ottava.doors.torchtitan: skip", skip, linears), 0
    for name, (found, parent, field) in linears.items():
        if reason := _stays(name, found, chosen):
            _LOG.info("ottava: %s stays: %s", name, reason)
            continue
        ours = derive(found, OttavaLinear.Config, recipe=recipe, name=name)
        if isinstance(parent, list):
            parent[field] = ours
        else:
            setattr(parent, field, ours)
        done += 1
    if not done:
        raise ValueError(f"ottava.doors.torchtitan: none of {len(linears)} linears can run under {recipe!r}")
    _LOG.info("ottava: %d of %d linears under recipe %r", done, len(linears), recipe)
    return cfg


@override(
    target=Linear.Config,
    fqns=["*.attention.*", "*.feed_forward.*", "*.shared_experts.*"],
    exact=True,
    description="ottava: linears of attention and MLPs under an FP8 recipe",
)
def linear(cfg: Any, recipe: Any = "tensorwise") -> Any:
    """Replaces the config of one linear of an attention or an MLP; a tiny one stays. It does not know its name.

    Args:
        recipe: a name, or a recipe's `to_dict()`.
    """
    _recipe(recipe)
    return cfg if _stays("", cfg, default_filter) else derive(cfg, OttavaLinear.Config, recipe=recipe)


def _stays(name: str, config: Any, chosen: Callable[[str, Any], str | None]) -> str | None:
    """Why a linear stays as it is; None: it takes the recipe."""
    if type(config) is not Linear.Config:
        return f"a {type(config).__qualname__}, with a forward of its own"
    sizes: Any = SimpleNamespace(in_features=config.in_features, out_features=config.out_features)
    return chosen(name, sizes)


def _recipe(given: Any) -> Recipe:
    return Recipe.from_dict(given) if isinstance(given, Mapping) else get_recipe(given)
