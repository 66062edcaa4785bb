"""Who else emulates FP8 on a CPU, measured beside ottava where installed: torchao and Microsoft's microxcaling."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from torch import nn


def _torchao(model: nn.Module) -> nn.Module:
    torchao: Any = importlib.import_module("torchao.float8")
    return torchao.convert_to_float8_training(model, config=torchao.Float8LinearConfig(emulate=True))  # type: ignore[no-any-return]


def _microxcaling(model: nn.Module) -> nn.Module:
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


EMULATORS: Mapping[str, Callable[[nn.Module], nn.Module]] = MappingProxyType(
    {"torchao tensorwise": _torchao, "microxcaling mxfp8": _microxcaling}
)
"""Adding one is one entry here."""


def emulated(make: Callable[[], nn.Module], names: Iterable[str] = tuple(EMULATORS)) -> dict[str, nn.Module]:
    """Those that are installed, each with a BF16 model of its own that it has converted.

    Args:
        make: gives the model, always with the same numbers; its Linears lie inside it.

    Example:
        >>> set(emulated(lambda: nn.Sequential(nn.Linear(32, 32)).bfloat16())) <= set(EMULATORS)
        True
    """
    models = {}
    for name in names:
        try:
            models[name] = EMULATORS[name](make())
        except ImportError:  # `machine` names its version, or None
            continue
    return models
