"""The libraries that have a door: their extra, the oldest version, and the version that the tests ran with.

It also says which models no door can take: those that somebody else has changed already.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import nn

from ottava.engine.layer import quantized_layers


class HostError(ImportError):
    """The host of a door is missing or too old; the message names the extra."""

    exit_code = 3


class Host(NamedTuple):
    """A library with a door."""

    extra: str
    """`pip install 'ottava[EXTRA]'` installs it."""
    least: str
    """The oldest version that a door takes."""
    tried: str
    """The version that the tests ran with."""
    module: str
    """The module of the door."""


HOSTS: Mapping[str, Host] = MappingProxyType(
    {
        "transformers": Host("transformers", "5.0", "5.23.0", "ottava.doors.transformers"),
        "accelerate": Host("accelerate", "1.10", "1.15.0", "ottava.doors.accelerate"),
        "peft": Host("peft", "0.18", "0.21.2", "ottava.doors.peft"),
    }
)
"""Distribution name -> what its door needs."""


def need_host(name: str) -> None:
    """Raises HostError unless a host of `HOSTS` is installed, and new enough.

    Example:
        >>> need_host("transformers")                            # doctest: +SKIP
    """
    host = HOSTS[name]
    try:
        got = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        got = ""
    if not got or _numbers(got) < _numbers(host.least):
        raise HostError(
            f"{host.module}: got {f'{name} {got}' if got else f'no {name}'}; needs {name} >= {host.least}, tried with "
            f"{host.tried}: pip install 'ottava[{host.extra}]'"
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def refuse_model(model: nn.Module) -> str | None:
    """Why no door can convert this model, and what to do; None if one can.

    Example:
        >>> refuse_model(nn.Linear(64, 64, device="meta"))
        'weight is on the meta device: load or initialize the model first'
        >>> refuse_model(nn.Linear(64, 64))
    """
    if layers := quantized_layers(model):
        return f"{layers[0].name or 'the model'!r} runs under recipe {layers[0].recipe.name!r} already: convert once"
    if hasattr(model, "_orig_mod"):
        return "it is a compiled model: convert first, then torch.compile"
    if isinstance(getattr(model, "module", None), nn.Module) and hasattr(model, "no_sync"):
        return f"it is wrapped by {type(model).__name__}: convert first, then wrap"
    method: Any = getattr(model, "quantization_method", None)
    if method not in (None, "ottava"):
        return f"it is quantized by {getattr(method, 'value', method)!r}: load it without that quantization_config"
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "device_mesh"):
            return f"{name} is sharded already: convert first, then shard"
        if parameter.is_meta:
            return f"{name} is on the meta device: load or initialize the model first"
        if parameter.dtype.itemsize == 1 or type(parameter) is not nn.Parameter:
            kind = type(parameter.data).__name__ if type(parameter) is nn.Parameter else type(parameter).__name__
            return f"{name} is a {kind} of {parameter.dtype}, quantized by somebody else: load it in high precision"
    return None
