"""Finds the layers of a model that cast, whoever made them, and turns their casts off and on for one run.

ottava                  by the settings of `ottava.autocast`
torchao                 by its layers' forward: torch's linear in its place
TransformerEngine       by its own fp8_autocast
a script's own          by the sites of torch's conversions: see `handmade`
nothing casts           every nn.Linear runs as an ottava layer under a recipe: what casts would do ("simulated")
"""

from __future__ import annotations

import copy
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from ottava.engine.autocast import Ambient
from ottava.engine.functional import QuantizedLayer
from ottava.experiments.handmade import Exact
from ottava.experiments.program import AS_IT_RAN, Way, without_casts
from ottava.experiments.replay import only_pattern
from ottava.nn.layer import Linear
from ottava.recipe import GEMMS, Override, Recipe, default_filter, get_recipe

_TORCHAO = ("Float8Linear", "Float8BlockwiseLinear", "MXFP8Linear", "NVFP4Linear", "MXLinear")
FOUR_BITS = 4


@dataclass(frozen=True)
class Casts:
    """The casts of a program, and the two ways to run it."""

    mode: str
    """"real" or "simulated"."""
    recipe: str
    bits: int
    """The fewest bits of a format that it casts to."""
    with_casts: Way
    without: Way
    layers: Mapping[str, nn.Module]
    """Full name -> layer with casts."""
    recipes: Mapping[str, Recipe]
    """Full name -> the recipe that a layer of ottava ran."""
    sites: tuple[str, ...] = ()
    """Where the script itself converts, see `handmade.Exact`."""


def casts_of(models: Sequence[nn.Module], name_of: Callable[[nn.Module], str], simulated: str | Recipe) -> Casts | None:
    """The casts of models that have run; None: nothing casts, and they have no linear layer to simulate.

    Args:
        models: those that ran.
        name_of: full name of a module.
        simulated: recipe of the simulation.
    """
    modules = {id(m): m for model in models for m in model.modules()}.values()
    ours = [m for m in modules if isinstance(m, QuantizedLayer) and (ran := _ran(m)) is not None and ran.casts]
    torchao = [m for m in modules if is_torchao(m)]
    engine = [m for m in modules if type(m).__module__.startswith("transformer_engine.") and hasattr(m, "fp8_meta")]
    their_state = getattr(sys.modules.get("transformer_engine.pytorch.fp8"), "FP8GlobalStateManager", None)
    if not (ours or torchao or (engine and their_state is not None)):
        return _simulated(modules, name_of, get_recipe(simulated))
    recipes = Counter(ran.name for m in ours if (ran := _ran(m)) is not None)
    recipes.update(f"torchao {_granularity(m)}" for m in torchao)
    recipes.update(["TransformerEngine"] * len(engine))
    bits = min([_bits(ran) for m in ours if (ran := _ran(m)) is not None], default=8)
    if any("NVFP4" in type(m).__name__ for m in torchao):
        bits = FOUR_BITS
    layers = {m.name or name_of(m): m for m in ours} | {name_of(m): m for m in (*torchao, *engine)}
    without = Way(without_casts, lambda: _without(torchao, bool(engine)))
    own = {m.name: ran for m in ours if (ran := _ran(m)) is not None}
    return Casts("real", recipes.most_common(1)[0][0], bits, AS_IT_RAN, without, layers, own)


def with_sites(casts: Casts | None, sites: Collection[str]) -> Casts:
    """These casts, and those that a script makes by torch's conversions.

    Args:
        casts: of layers; simulated ones go.
        sites: of a run with `handmade.Exact`.
    """
    exact = Exact(libraries=False)
    if casts is None or casts.mode == "simulated":
        name = f"conversions at {next(iter(sites), '')}"
        return Casts("real", name, 8, AS_IT_RAN, Way(mode=exact, saves=False), {}, {}, tuple(sites))
    return replace(casts, without=replace(casts.without, mode=exact, saves=False), sites=tuple(sites))


def is_torchao(module: nn.Module) -> bool:
    """Whether a module is a training layer of torchao that casts."""
    return any(k.__name__ in _TORCHAO and k.__module__.startswith("torchao.") for k in type(module).__mro__)


def only_without(casts: Casts, off: Collection[tuple[str, str]]) -> Way:
    """The run with the casts of these (layer, GEMM) off; of layers of other packages and of sites, GEMM is ""."""
    layers = {name for name, _ in off}
    torchao = [m for name, m in casts.layers.items() if name in layers and is_torchao(m)]
    left = {
        n: tuple((g, getattr(recipe, g)) for g in GEMMS if (n, g) not in off) for n, recipe in casts.recipes.items()
    }
    overrides = tuple(Override(only_pattern(name), gemms) for name, gemms in left.items() if gemms)
    recipe = replace(get_recipe("bf16"), name="ablation", overrides=overrides)

    def ambient(before: Ambient) -> Ambient:
        return replace(before, recipe=recipe, enabled=True) if casts.recipes else before

    sites = [site for site in casts.sites if (site, "") in off]
    return Way(ambient, lambda: _without(torchao, engine=False), Exact(sites, libraries=False) if sites else None)


def _ran(layer: QuantizedLayer) -> Recipe | None:
    """The recipe of a layer's last training forward."""
    call = layer.last_call
    return None if call is None else call.recipe


def _bits(recipe: Recipe) -> int:
    specs = (getattr(getattr(recipe, gemm), side) for gemm in GEMMS for side in ("lhs", "rhs"))
    return min((spec.format.bits for spec in specs if spec is not None), default=8)


def _granularity(module: Any) -> str:
    spec = getattr(getattr(module, "config", None), "cast_config_input", None)
    return type(module).__name__ if spec is None else spec.scaling_granularity.name


@contextmanager
def _without(torchao: Sequence[nn.Module], engine: bool) -> Iterator[None]:
    theirs = sys.modules["transformer_engine.pytorch"].fp8_autocast(enabled=False) if engine else nullcontext()
    with _replaced({m: torchs_linear(m) for m in torchao}), theirs:
        yield


def torchs_linear(module: Any) -> Callable[..., Any]:
    """The forward of a layer in high precision: torch's own linear."""
    return lambda input: nn.functional.linear(input, module.weight, module.bias)


@contextmanager
def _replaced(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Modules with another forward."""
    with ExitStack() as stack:
        for module, forward in forwards.items():
            stack.callback(vars(module).update, {k: v for k, v in vars(module).items() if k == "forward"})
            stack.callback(vars(module).pop, "forward", None)
            vars(module)["forward"] = forward
        yield


def _simulated(modules: Collection[nn.Module], name_of: Callable[[nn.Module], str], recipe: Recipe) -> Casts | None:
    embedded = {id(m._parameters.get("weight")) for m in modules if isinstance(m, nn.Embedding)}
    twins = {}
    for module in modules:
        if type(module) is not nn.Linear or "forward" in vars(module) or not module.weight.is_floating_point():
            continue
        assert isinstance(module, nn.Linear)
        if default_filter(name := name_of(module), module) is None and id(module.weight) not in embedded:
            twins[module] = _twin(module, recipe, name)
    ours = {m.name or name_of(m): m for m in modules if isinstance(m, QuantizedLayer)}  # in high precision
    if not (twins or ours):
        return None
    forwards: dict[nn.Module, Callable[..., Any]] = {module: twin.forward for module, twin in twins.items()}
    layers: dict[str, nn.Module] = {**ours, **{twin.name: twin for twin in twins.values()}}
    way = Way(lambda a: replace(a, recipe=recipe, enabled=True), lambda: _replaced(forwards))
    return Casts("simulated", recipe.name, _bits(recipe), way, Way(switched=nullcontext), layers, {})


def _twin(module: nn.Linear, recipe: Recipe, name: str) -> Linear:
    """An ottava layer with the parameters of a torch layer, which stays as it is."""
    twin = copy.copy(module)
    for key, value in vars(twin).items():
        if isinstance(value, (dict, OrderedDict)) and key != "_parameters":
            vars(twin)[key] = type(value)()
    twin.__class__ = Linear
    assert isinstance(twin, Linear)
    twin.adopt(recipe, name)
    return twin
