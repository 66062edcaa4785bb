"""What every door asks first: is its host installed and new enough, and can the model go through."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import nn
from torch.nn.parameter import is_lazy

from ottava.base.errors import need, unknown_name
from ottava.engine.functional import QuantizedLayer
from ottava.recipe import default_filter


class HostError(ImportError):
    """The host of a door is missing or too old; the message names the extra."""

    exit_code = 3


class Host(NamedTuple):
    """A package that a door plugs into; ottava's extra has the name of the door."""

    package: str
    """Its name for pip."""
    oldest: str
    """The oldest version that the door takes."""
    tried: str
    """The version that its tests ran with last."""


HOSTS: Mapping[str, Host] = MappingProxyType(
    {
        "transformers": Host("transformers", "5.16", "5.23.0"),
        "accelerate": Host("accelerate", "1.10", "1.15.0"),
        "peft": Host("peft", "0.18", "0.21.2"),
        "lightning": Host("lightning", "2.4", "2.6.6"),
        "torchtitan": Host("torchtitan", "0.3", "0.3.0"),
        "megatron": Host("megatron-core", "0.16", "0.16.1"),
        "axolotl": Host("axolotl", "0.19", "0.19.0"),
    }
)
"""Door -> its host. `ottava.doors.trainer` has the host of the door transformers."""

_QUANTIZERS = (
    "bitsandbytes",
    "torchao",
    "transformer_engine",
    "compressed_tensors",
    "gptqmodel",
    "awq",
    "hqq",
    "quanto",
)
"""Packages whose linear layers hold codes, or cast by themselves."""


def need_host(door: str) -> None:
    """Refuses a machine without the host of a door, or with a host that is too old.

    Raises:
        HostError: the message has the version that was found, the one that is needed, and the command.
    """
    package, oldest, tried = HOSTS[door]
    try:
        found = version(package)
    except PackageNotFoundError:
        found = ""
    if not found or _numbers(found) < _numbers(oldest):
        got = f"{package} {found}" if found else f"no {package}"
        raise HostError(
            f"ottava's door to {door}: got {got}; needs {package} {oldest} or newer (tried: {tried}): "
            f"pip install 'ottava[{door}]'"
        )


def refuse_model(door: str, model: nn.Module) -> None:
    """Refuses a model that somebody has converted, compiled, sharded or quantized already, or that has no memory.

    Raises:
        TypeError: it is no module.
        ValueError: the message names the first module or parameter that is in the way, and says what to do.

    Example:
        >>> refuse_model("OttavaPrecision", nn.Linear(4, 4, device="meta"))
        Traceback (most recent call last):
        ValueError: OttavaPrecision: weight is on the meta device, without numbers; load the weights first
    """
    need(door, model, nn.Module)
    for name, module in model.named_modules():
        if reason := _of_module(module):
            raise ValueError(f"{door}: {name or 'the model'} {reason}")
    for name, parameter in model.named_parameters():
        if reason := _of_parameter(parameter):
            raise ValueError(f"{door}: {name} {reason}")


def without(door: str, skip: Iterable[str], layers: Iterable[str]) -> Callable[[str, Any], str | None]:
    """The filter of a conversion: `default_filter`, and layers whose names match shell patterns stay.

    Raises:
        ValueError: a pattern matches none of the layers.
    """
    patterns, names = tuple(skip), tuple(layers)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(f"{door}: {unknown_name('pattern', pattern, names)}")

    def stays(name: str, layer: Any) -> str | None:
        pattern = next((one for one in patterns if fnmatchcase(name, one)), None)
        return default_filter(name, layer) if pattern is None else f"skipped by {pattern!r}"

    return stays


def _of_module(module: nn.Module) -> str | None:
    if isinstance(module, QuantizedLayer):
        return f"is under ottava's recipe {module.recipe.name!r} already; convert once: here or in your own code"
    if type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None:
        return "is compiled; hand in the plain model, and call torch.compile after the conversion"
    if type(module).__name__ == "FullyShardedDataParallel":
        return "is sharded by FSDP1; convert first and shard after"
    if isinstance(getattr(module, "module", None), nn.Module) and hasattr(module, "no_sync"):
        return f"is wrapped by {type(module).__name__}; convert first and wrap after"
    method: Any = getattr(module, "quantization_method", None)
    if method not in (None, "ottava"):
        return f"is quantized by {getattr(method, 'value', method)!r}; load it without that quantization_config"
    package = type(module).__module__.partition(".")[0]
    if package in _QUANTIZERS and hasattr(module, "in_features"):
        return f"is a {type(module).__name__} of {package}, which quantizes by itself; build the model without it"
    return None


def _of_parameter(parameter: Any) -> str | None:
    if hasattr(parameter, "ds_id"):
        return "is sharded by DeepSpeed's ZeRO-3; convert first and call deepspeed.initialize after"
    if hasattr(parameter, "device_mesh"):
        return f"is sharded already, as {type(parameter).__name__}; convert first and shard after"
    if parameter.is_meta:
        return "is on the meta device, without numbers; load the weights first"
    if is_lazy(parameter):
        return "has no size yet; run the model once first"
    kind = type(parameter)
    if kind is not nn.Parameter:
        return f"is quantized already (a {kind.__name__} of {kind.__module__.partition('.')[0]}); load plain weights"
    if parameter.dtype.itemsize == 1 or not (parameter.is_floating_point() or parameter.is_complex()):
        return f"is quantized already ({parameter.dtype}); load the model without quantization"
    return None


def _numbers(text: str) -> tuple[int, ...]:
    """2.6.1rc1 -> (2, 6, 1, 0), so that 5 and 5.0 are one version."""
    found = re.match(r"\d+(\.\d+)*", text)
    return (*map(int, found[0].split(".") if found else ()), 0, 0, 0, 0)[:4]
