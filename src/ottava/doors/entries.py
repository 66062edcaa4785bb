"""The entries of a checkpoint that transformers would not load: histories of delayed scaling, codes and their scales.

Histories travel packed as one tensor, a safetensors file as bytes. transformers renames, cuts and merges tensors by
patterns over their names, and cuts those of a layer `experts.down_proj_groups.0` in pieces, too.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from ottava.engine.quantizer import Quantizer
from ottava.nn.layer import LayerView
from ottava.weights.checkpoint import SCALE_SUFFIX

_LOG = logging.getLogger(__name__)
HISTORIES = "ottava_histories"
"""The name of the packed tensor, uint8."""
NOT_LOADED = (rf"{HISTORIES}$", rf"{SCALE_SUFFIX}$")
"""Patterns of these names."""


def take_histories(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Removes the histories of a model's doors from its state dict, and returns them.

    Example:
        >>> import ottava
        >>> model = nn.Sequential(nn.Linear(64, 64))
        >>> report = ottava.convert(model, "delayed")
        >>> state = model.state_dict()
        >>> len(take_histories(model, state)), list(state)
        (15, ['0.weight', '0.bias'])
    """
    doors = {name for name, module in model.named_modules() if isinstance(module, Quantizer)}
    return {key: state.pop(key) for key in list(state) if key.rpartition(".")[0] in doors}


def pack_histories(model: nn.Module, state: dict[str, Tensor], *, leave_out: bool) -> None:
    """Puts the histories of a state dict into one entry; with `leave_out` it drops them, and says so."""
    histories = take_histories(model, state)
    if histories and leave_out:
        _LOG.warning(
            "ottava: the upload is without the histories of delayed scaling (%s tensors), which other software may "
            "reject: a training that goes on from it begins with current scales. They stay in the files on this "
            "disk; OttavaConfig(push_histories=True) uploads them, too",
            f"{len(histories):,}",
        )
    elif histories:
        state[HISTORIES] = pack(histories)


def refuse_stacks(layers: Mapping[str, object]) -> None:
    """Refuses stacks of experts, which transformers cuts apart when it saves.

    Raises:
        ValueError: one of these layers is a piece of a stack.
    """
    for name, layer in layers.items():
        if isinstance(layer, LayerView) and isinstance(layer.piece, int):
            raise ValueError(
                f"OttavaConfig: weights='fp8' is not for {name!r}: transformers saves experts one by one, "
                "and would part codes and scales. Take weights=None, or skip='*.experts.*'"
            )


def pack(histories: dict[str, Tensor]) -> Tensor:
    """The tensor that holds them."""
    data = safetensors.torch.save({name: value.cpu().contiguous() for name, value in histories.items()})
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def unpack(packed: Tensor) -> dict[str, Tensor]:
    """The inverse of `pack`.

    Example:
        >>> unpack(pack({"a": torch.ones(2)}))
        {'a': tensor([1., 1.])}
    """
    return safetensors.torch.load(packed.numpy().tobytes())


def unpack_before_load(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """A hook before `load_state_dict`, which the Trainer calls when it resumes."""
    if (packed := state.pop(prefix + HISTORIES, None)) is not None:
        state |= {prefix + name: value for name, value in unpack(packed).items()}


def read_entries(model: Any, files: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    """Histories, codes and scales in the files of a checkpoint, by the names of the model."""
    own, prefix = set(model.state_dict()), f"{model.base_model_prefix}."
    with ExitStack() as opened:
        for path in files:
            file = opened.enter_context(safetensors.safe_open(path, framework="pt"))
            keys = set(file.keys())
            scales = {key for key in keys if key.endswith(SCALE_SUFFIX)}
            codes = {key.removesuffix(SCALE_SUFFIX) for key in scales} & keys
            found = {key: file.get_tensor(key) for key in scales | codes}
            for key in keys:
                if key.endswith(HISTORIES):
                    found |= unpack(file.get_tensor(key))
            for key, value in found.items():
                names = (key, key.removeprefix(prefix), prefix + key)  # a file of the whole, a model of a part, or back
                yield next((name for name in names if name in own), key), value
