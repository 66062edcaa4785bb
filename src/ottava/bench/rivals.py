"""The packages that `ottava bench` measures beside ottava.

On a GPU these are BF16 eager and compiled, torchao, Liger's kernels and TransformerEngine; on a CPU the FP8 emulators
torchao and Microsoft's microxcaling. Each rival converts the same BF16 module to a contender. If a rival cannot be
imported, the report names it with the reason. If it fails later, its error ends the run.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from ottava.bench.method import Run
from ottava.nn.convert import convert

Forward = Callable[..., Tensor]
RECIPES = ("tensorwise", "rowwise", "blockwise", "delayed", "guarded")
"""ottava's recipes that run on the tensor cores of a GPU."""


@dataclass(frozen=True)
class Contender:
    """One way to run a model."""

    name: str
    """Its name in tables."""
    model: nn.Module
    """The model with the trained parameters."""
    forward: Forward
    """The function to call."""


@dataclass(frozen=True)
class Rival:
    """Another package that runs a model in FP8, or faster in BF16."""

    package: str
    """The module to import."""
    change: Callable[[nn.Module, Run], nn.Module]
    """Changes the BF16 model in place, or returns another one."""
    compiled: bool = False
    """Run it under torch.compile, as its authors advise."""


def _torchao(model: nn.Module, run: Run, recipe: str) -> nn.Module:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=not run.cuda)
    return convert_to_float8_training(model, config=config)  # type: ignore[no-any-return]


def _liger(model: nn.Module, run: Run) -> nn.Module:
    norms = importlib.import_module("liger_kernel.transformers.rms_norm")
    gates = importlib.import_module("liger_kernel.ops.swiglu")
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.RMSNorm):
            norm = norms.LigerRMSNorm(module.normalized_shape[0], eps=module.eps or 1e-6, in_place=False)
            norm.weight = module.weight
            model.set_submodule(name, norm)
        if hasattr(module, "swiglu"):
            module.swiglu = gates.LigerSiLUMulFunction.apply
    return model


class _InTransformerEngine(nn.Module):
    """A model with TransformerEngine's Linears that runs under TransformerEngine's autocast."""

    def __init__(self, model: nn.Module, autocast: Callable[[], AbstractContextManager[Any]]) -> None:
        super().__init__()
        self.model, self.autocast = model, autocast

    def forward(self, *args: Any) -> Any:
        """Calls the model."""
        with self.autocast():
            return self.model(*args)


def _transformer_engine(model: nn.Module, run: Run, recipe: str) -> nn.Module:
    te = importlib.import_module("transformer_engine.pytorch")
    recipes = importlib.import_module("transformer_engine.common.recipe")
    te_recipe = {
        "delayed": lambda: recipes.DelayedScaling(fp8_format=recipes.Format.HYBRID, margin=0),
        "current": recipes.Float8CurrentScaling,
        "block": recipes.Float8BlockScaling,
    }[recipe]()
    holder = nn.ModuleList([model])  # the model itself may be a Linear
    for name, module in list(holder.named_modules()):
        if isinstance(module, nn.Linear):
            sizes, bias = (module.in_features, module.out_features), module.bias is not None
            layer = te.Linear(*sizes, bias=bias, params_dtype=module.weight.dtype, device=module.weight.device)
            with torch.no_grad():
                layer.weight.copy_(module.weight)
                if bias:
                    layer.bias.copy_(module.bias)
            holder.set_submodule(name, layer)
    return _InTransformerEngine(holder[0], lambda: te.autocast(enabled=True, recipe=te_recipe))


def _microxcaling(model: nn.Module, run: Run) -> nn.Module:
    """E4M3 in blocks of 32 for all operands of all GEMMs, without microxcaling's elementwise BF16 rounding in front."""
    importlib.import_module("mx.mx_ops")  # other packages have the name mx, too
    mx: Any = importlib.import_module("mx")
    settings = {
        "scale_bits": 8,
        "w_elem_format": "fp8_e4m3",
        "a_elem_format": "fp8_e4m3",
        "block_size": 32,
        "bfloat": 0,
    }
    specs = mx.finalize_mx_specs({**settings, "custom_cuda": False})
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            layer = mx.Linear(module.in_features, module.out_features, module.bias is not None, mx_specs=specs)
            layer.to(module.weight.dtype).load_state_dict(module.state_dict())
            model.set_submodule(name, layer)
    return model


RIVALS: Mapping[str, Rival] = MappingProxyType(
    {
        "torchao tensorwise": Rival("torchao.float8", partial(_torchao, recipe="tensorwise"), compiled=True),
        "torchao rowwise": Rival("torchao.float8", partial(_torchao, recipe="rowwise"), compiled=True),
        "liger bf16": Rival("liger_kernel", _liger),
        "te delayed": Rival("transformer_engine.pytorch", partial(_transformer_engine, recipe="delayed")),
        "te current": Rival("transformer_engine.pytorch", partial(_transformer_engine, recipe="current")),
        "te block": Rival("transformer_engine.pytorch", partial(_transformer_engine, recipe="block")),
    }
)
"""Rivals on a GPU. A new rival is one entry here."""
EMULATORS: Mapping[str, Rival] = MappingProxyType(
    {"torchao tensorwise": RIVALS["torchao tensorwise"], "microxcaling mxfp8": Rival("mx.mx_ops", _microxcaling)}
)
"""Rivals on a CPU."""


def missing() -> dict[str, str]:
    """Rivals that cannot run on this machine, with the reason.

    Example:
        >>> set(missing()) <= set(RIVALS)
        True
    """
    reasons = {}
    for name, rival in RIVALS.items():
        try:
            importlib.import_module(rival.package)
        except (
            Exception
        ) as error:  # e.g. a library of another CUDA, or an assertion about torch: the report shows any error
            reasons[name] = f"{type(error).__name__}: {error}"
    return reasons


def contenders(run: Run, make: Callable[[], nn.Module], recipes: tuple[str, ...] = RECIPES) -> list[Contender]:
    """BF16, BF16 compiled, each recipe eager and compiled, and the rivals on this machine, in this order.

    Args:
        make: returns the BF16 model, always with the same weights.
    """
    bf16 = make()
    models = [Contender("bf16", bf16, bf16)]
    if run.compiled:
        model = make()
        models.append(Contender("bf16 compiled", model, torch.compile(model)))
    for recipe in recipes:
        model = make()
        convert(model, recipe, filter=lambda name, layer: True)
        models.append(Contender(recipe, model, model))
        if run.compiled:
            model = make()
            convert(model, recipe, filter=lambda name, layer: True)
            models.append(Contender(f"{recipe} compiled", model, torch.compile(model)))
    absent = missing() if run.rivals else RIVALS
    for name, rival in RIVALS.items():
        if name not in absent and (run.cuda or rival.package == "torchao.float8"):
            model = rival.change(make(), run)
            compiled = rival.compiled and run.compiled
            models.append(
                Contender(f"{name} compiled" if compiled else name, model, torch.compile(model) if compiled else model)
            )
    return models


def emulated(make: Callable[[], nn.Module], names: Iterable[str] = tuple(EMULATORS)) -> dict[str, nn.Module]:
    """The installed emulators, each with its own converted BF16 model.

    Args:
        make: returns the model, always with the same weights. Its Linears must be submodules.

    Example:
        >>> set(emulated(lambda: nn.Sequential(nn.Linear(32, 32)).bfloat16())) <= set(EMULATORS)
        True
    """
    run, models = Run(torch.device("cpu"), smoke=False, rounds=1), {}
    for name in names:
        try:
            models[name] = EMULATORS[name].change(make(), run)
        except ImportError:  # `bench.cpu.machine` names its version, or None
            continue
    return models
