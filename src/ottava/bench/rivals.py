"""Who is measured beside ottava: BF16 as it is and compiled, torchao, Liger's kernels, TransformerEngine; on a CPU who
else emulates FP8: torchao and Microsoft's microxcaling.

Each takes the same BF16 module and makes a contender of it. One that cannot be imported is left out, and the report
names it with the reason; one that fails while it is built or run fails the run, loudly.
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
"""Of ottava, those that a GPU has tensor cores for."""


@dataclass(frozen=True)
class Contender:
    """One way to run a model."""

    name: str
    """In tables."""
    model: nn.Module
    """Whose parameters are trained."""
    forward: Forward
    """What is called."""


@dataclass(frozen=True)
class Rival:
    """Another package's way."""

    package: str
    """What is imported."""
    change: Callable[[nn.Module, Run], nn.Module]
    """The BF16 model, changed in place or replaced."""
    compiled: bool = False
    """Under torch.compile, as its authors advise."""


def _torchao(model: nn.Module, run: Run, recipe: str) -> nn.Module:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=not run.cuda)
    return convert_to_float8_training(model, config=config)  # type: ignore[no-any-return]


def _liger(model: nn.Module, run: Run) -> nn.Module:
    norms = importlib.import_module("liger_kernel.transformers.rms_norm")
    gates = importlib.import_module("liger_kernel.ops.swiglu")
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.RMSNorm):
            own = norms.LigerRMSNorm(module.normalized_shape[0], eps=module.eps or 1e-6, in_place=False)
            own.weight = module.weight
            model.set_submodule(name, own)
        if hasattr(module, "swiglu"):
            module.swiglu = gates.LigerSiLUMulFunction.apply
    return model


class _InTransformerEngine(nn.Module):
    """A model whose Linears are TransformerEngine's, called under its autocast."""

    def __init__(self, model: nn.Module, autocast: Callable[[], AbstractContextManager[Any]]) -> None:
        super().__init__()
        self.model, self.autocast = model, autocast

    def forward(self, *args: Any) -> Any:
        """As the model."""
        with self.autocast():
            return self.model(*args)


def _transformer_engine(model: nn.Module, run: Run, recipe: str) -> nn.Module:
    te = importlib.import_module("transformer_engine.pytorch")
    recipes = importlib.import_module("transformer_engine.common.recipe")
    made = {
        "delayed": lambda: recipes.DelayedScaling(fp8_format=recipes.Format.HYBRID, margin=0),
        "current": recipes.Float8CurrentScaling,
        "block": recipes.Float8BlockScaling,
    }[recipe]()
    holder = nn.ModuleList([model])  # the model itself may be a Linear
    for name, module in list(holder.named_modules()):
        if isinstance(module, nn.Linear):
            sizes, bias = (module.in_features, module.out_features), module.bias is not None
            own = te.Linear(*sizes, bias=bias, params_dtype=module.weight.dtype, device=module.weight.device)
            with torch.no_grad():
                own.weight.copy_(module.weight)
                if bias:
                    own.bias.copy_(module.bias)
            holder.set_submodule(name, own)
    return _InTransformerEngine(holder[0], lambda: te.autocast(enabled=True, recipe=made))


def _microxcaling(model: nn.Module, run: Run) -> nn.Module:
    """E4M3 in blocks of 32 for all operands of all GEMMs, which its elementwise BF16 rounding does not precede."""
    importlib.import_module("mx.mx_ops")  # other packages are called mx too
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
            own = mx.Linear(module.in_features, module.out_features, module.bias is not None, mx_specs=specs)
            own.to(module.weight.dtype).load_state_dict(module.state_dict())
            model.set_submodule(name, own)
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
"""On a GPU. Adding one is one entry here."""
EMULATORS: Mapping[str, Rival] = MappingProxyType(
    {"torchao tensorwise": RIVALS["torchao tensorwise"], "microxcaling mxfp8": Rival("mx.mx_ops", _microxcaling)}
)
"""On a CPU."""


def missing() -> dict[str, str]:
    """Rival -> why it cannot be measured here; those that can are left out.

    Example:
        >>> set(missing()) <= set(RIVALS)
        True
    """
    reasons = {}
    for name, rival in RIVALS.items():
        try:
            importlib.import_module(rival.package)
        except Exception as error:  # a library of another CUDA, an assertion about torch: whatever it is, it is said
            reasons[name] = f"{type(error).__name__}: {error}"
    return reasons


def contenders(run: Run, make: Callable[[], nn.Module], recipes: tuple[str, ...] = RECIPES) -> list[Contender]:
    """BF16 first, then BF16 compiled, each recipe eager and compiled, and the rivals that are here.

    Args:
        make: gives the BF16 model, always with the same numbers.
    """
    bf16 = make()
    found = [Contender("bf16", bf16, bf16)]
    if run.compiled:
        model = make()
        found.append(Contender("bf16 compiled", model, torch.compile(model)))
    for recipe in recipes:
        model = make()
        convert(model, recipe, filter=lambda name, layer: True)
        found.append(Contender(recipe, model, model))
        if run.compiled:
            model = make()
            convert(model, recipe, filter=lambda name, layer: True)
            found.append(Contender(f"{recipe} compiled", model, torch.compile(model)))
    absent = missing() if run.rivals else RIVALS
    for name, rival in RIVALS.items():
        if name not in absent and (run.cuda or rival.package == "torchao.float8"):
            model = rival.change(make(), run)
            compiled = rival.compiled and run.compiled
            found.append(
                Contender(f"{name} compiled" if compiled else name, model, torch.compile(model) if compiled else model)
            )
    return found


def emulated(make: Callable[[], nn.Module], names: Iterable[str] = tuple(EMULATORS)) -> dict[str, nn.Module]:
    """Those emulators that are installed, each with a BF16 model of its own that it has converted.

    Args:
        make: gives the model, always with the same numbers; its Linears lie inside it.

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
