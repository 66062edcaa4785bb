"""What every door asks first: is its host installed and new enough, and can the model go through."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn

from ottava.base.errors import need
from ottava.engine.layer import QuantizedLayer


class Host(NamedTuple):
    """A package that a door plugs into."""

    package: str
    """Its name for pip, and in ottava's extra of the same name as the door."""
    oldest: str
    """The oldest version whose hooks the door knows."""
    tried: str
    """The version that its tests ran with last."""


HOSTS: Mapping[str, Host] = MappingProxyType(
    {
        "lightning": Host("lightning", "2.4", "2.6.6"),
        "torchtitan": Host("torchtitan", "0.3", "0.3.0"),
        "megatron": Host("megatron-core", "0.16", "0.16.1"),
        "axolotl": Host("axolotl", "0.19", "0.19.0"),
    }
)
"""Door -> its host."""

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
        ImportError: the message has the version that was found, the one that is needed, and the command.
    """
    host = HOSTS[door]
    needs = f"needs {host.package} {host.oldest} or newer (tried: {host.tried}): pip install 'ottava[{door}]'"
    try:
        found = version(host.package)
    except PackageNotFoundError:
        raise ModuleNotFoundError(f"ottava.doors.{door}: {host.package} is not installed; {needs}", name=door) from None
    if _numbers(found) < _numbers(host.oldest):
        raise ImportError(f"ottava.doors.{door}: got {host.package} {found}; {needs}", name=door)


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


def _of_module(module: nn.Module) -> str | None:
    if isinstance(module, QuantizedLayer):
        return f"is under ottava's recipe {module.recipe.name!r} already; convert once: here or in your own code"
    if type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None:
        return "is compiled; hand in the plain model, and call torch.compile after the conversion"
    if type(module).__name__ == "FullyShardedDataParallel":
        return "is sharded by FSDP1; convert first and shard after"
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
    kind = type(parameter.data)
    if kind is not torch.Tensor or parameter.dtype.itemsize == 1 or not parameter.is_floating_point():
        held = parameter.dtype if kind is torch.Tensor else f"a {kind.__name__} of {kind.__module__.partition('.')[0]}"
        return f"is quantized already ({held}); load the model without quantization"
    return None


def _numbers(text: str) -> tuple[int, ...]:
    """2.6.6 -> (2, 6, 6); what follows the numbers does not count."""
    found = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, found[0].split("."))) if found else ()
