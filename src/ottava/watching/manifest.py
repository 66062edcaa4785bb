"""The parts of watch.json that tell what ran where, and which layers the watch saw."""

from __future__ import annotations

import gc
import os
import platform
import re
import sys
import weakref
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import torch
from torch import nn

from ottava.base import __version__
from ottava.recipe import Recipe
from ottava.watching.adapters import casting
from ottava.watching.doors import DoorTap
from ottava.watching.modules import ModuleTap

_NO_SETTING = re.compile(
    r"^_|\._|name_or_path|version|architectures|seed|_dir$|run_name|report_to|tqdm|secret|password|api_key|_token$|"
    r"^(logging_|log_level|log_on|save_|eval_|hub_|push_|local_rank|ddp_)"
)
"""What tells nothing of how a model computes or learns, and what nobody may read."""
_LONGEST = 200


def start_of_run(world_size: int) -> dict[str, Any]:
    """Versions, command, time and host."""
    cuda = torch.cuda.is_available()
    return {
        "ended": "",  # until `close` says why
        "versions": {
            "ottava": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "command": list(sys.argv),
        "cwd": os.getcwd(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": {
            "device": torch.cuda.get_device_name() if cuda else f"{platform.machine()} CPU",
            "platform": platform.platform(),
            "world_size": world_size,
        },
    }


def coverage(doors: DoorTap, modules: ModuleTap, *, trained: bool) -> dict[str, Any]:
    """All layers, and how many of them the watch saw; with the reason for each that it did not see.

    trained: whether a step has ended. Whether a cast to 8 bits or fewer ran in it is "cast".
    """
    hooked = modules.coverage()
    by_hook = {layer["name"] for layer in hooked if layer["seen"]}  # a layer of ours in BF16 has no cast at its doors
    layers = [
        {
            "name": name,
            "source": "door",
            "seen": name in doors.seen or name in by_hook,
            **_facts(ref()),
            "dtypes": doors.dtypes.get(name, {}),
        }
        for name, ref in doors.expected().items()
    ]
    layers += [{**layer, "source": "hook"} for layer in hooked if layer["name"] not in doors.layers]
    layers = [{**layer, "before": modules.before.get(layer["name"], "")} for layer in layers]
    skipped = [{"name": x["name"], "why": x.get("why") or "never ran"} for x in layers if not x["seen"]]
    ran = any(_has_cast(name in doors.seen, ref()) for name, ref in doors.layers.items())
    return {
        "layers": layers,
        "cast": {"ran": trained and (ran or any(layer["casts"] and layer["source"] == "hook" for layer in layers))},
        "coverage": {"linear": len(layers), "seen": len(layers) - len(skipped), "skipped": skipped},
        "recipes": {
            recipe.name: recipe.to_dict() for recipe in (*modules.recipes(), *recipes_of(doors.layers.values()))
        },
    }


def configured(roots: Iterable[nn.Module]) -> dict[str, dict[str, Any]]:
    """What a model, its adapters and a Trainer of transformers were configured with: plain values by name.

    A config is what has `to_dict`, or a dict, at the first module that has one; PEFT's has one an adapter. A Trainer is
    not to be reached from a model, so its arguments are found among the objects of the process.
    """
    found: dict[str, dict[str, Any]] = {}
    modules = [module for root in roots for module in root.modules()]
    for name in ("config", "peft_config"):
        with suppress(Exception):  # code of users: a config may be anything
            config = next((c for m in modules if (c := getattr(m, name, None)) is not None), None)
            values = config if isinstance(config, Mapping) else getattr(config, "to_dict", dict)()
            found["model_config"] = found.get("model_config", {}) | _plain(values, "" if name == "config" else "peft.")
    with suppress(Exception):
        if (module := sys.modules.get("transformers.training_args")) is not None:
            given = [one for one in gc.get_objects() if issubclass(type(one), module.TrainingArguments)]
            found["trainer"] = _plain(given[-1].to_dict())
    return {key: values for key, values in found.items() if values}


def _plain(values: Mapping[Any, Any], above: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        name, value = f"{above}{key}", sorted(value) if isinstance(value, (set, frozenset)) else value
        value = value.to_dict() if hasattr(value, "to_dict") else value
        if isinstance(value, Mapping):
            found |= _plain(value, f"{name}.")
        elif not _NO_SETTING.search(name) and len(text := str(value)) <= _LONGEST:
            found[name] = value if isinstance(value, (bool, int, str)) or value is None else text
    return found


def recipes_of(layers: Iterable[weakref.ref[nn.Module]]) -> list[Recipe]:
    """The recipes of ottava layers as they were given, overrides included; of several with one name the first."""
    found: dict[str, Recipe] = {}
    for ref in layers:
        recipe = getattr(ref(), "recipe", None)
        if isinstance(recipe, Recipe):
            found.setdefault(recipe.name, recipe)
    return list(found.values())


def _has_cast(seen: bool, layer: Any) -> bool:
    """Whether a layer of ours has cast in a training forward: a door was seen at it, or its last call tells."""
    call = getattr(layer, "last_call", None)
    call = None if call is None else call.last_training
    return seen or (call is not None and bool(call.recipe.casts))


def _facts(layer: Any) -> dict[str, Any]:
    if layer is None:
        return {"type": "gone", "shape": None, "recipe": "", **casting(None, None)}
    shape = [layer.out_features, layer.in_features] if hasattr(layer, "weight") else None
    call = getattr(layer, "last_call", None)
    call = None if call is None else call.last_training
    recipe = layer.resolved if call is None else call.recipe
    return {"type": type(layer).__name__, "shape": shape, **casting(layer, recipe)}
