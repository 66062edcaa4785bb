"""State dicts by TransformerEngine's keys: renamed on the way out and in, `_extra_state` read without executing it.

Weights, norms and, for delayed scaling, histories and scales are loaded. A state dict made here has the same keys and
an empty `_extra_state`: TransformerEngine then starts its histories anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from ottava.compat.transformer_engine.common.recipe import DelayedScaling, Format
from ottava.debug.state_file import StateFileError, format_maxima, read_extra_state
from ottava.quantized_layer import QuantizedLayer

_SLOTS = MappingProxyType({"fwd": ("input", "weight", "output"), "bwd": ("grad_output", "grad_input")})
_STATE = "_extra_state"
_FIELDS = ("margin", "amax_history_len", "amax_compute_algo")

Parts = str | Sequence[tuple[str, int]]


class TEState(nn.Module):
    """A module whose state dict has TransformerEngine's keys."""

    def uses_their_keys(
        self,
        keys: Mapping[str, Parts],
        states: Mapping[str, Sequence[str]],
        orders: Mapping[str, Sequence[int]] = MappingProxyType({}),
    ) -> None:
        """Renames keys whenever a state dict is made or loaded; called once, at the end of a constructor.

        Args:
            keys: own key -> TransformerEngine's; or its keys and their rows, one after the other, of a parameter that
                lies in one piece here; rows 0: each key is one matrix of a stack.
            states: path of TransformerEngine's module that saves histories -> own layers, in the order of its GEMMs.
            orders: own key -> its rows in the order in which TransformerEngine's parameter has them; a state dict then
                holds a copy.
        """
        self._keys, self._states, self._orders = dict(keys), dict(states), dict(orders)
        self._own_names = {parts: own for own, parts in keys.items() if isinstance(parts, str)}
        self.register_state_dict_post_hook(_rename_out)
        self.register_load_state_dict_pre_hook(_rename_in)

    def __getattr__(self, name: str) -> Any:
        """Parameters by TransformerEngine's names too."""
        own = self.__dict__.get("_own_names", {}).get(name)
        if own is None or own == name:
            return super().__getattr__(name)
        path, _, last = own.rpartition(".")
        return getattr(self.get_submodule(path), last)

    def take_history(self, saved: Any, layers: Sequence[str]) -> None:
        """Histories and scales of delayed scaling, from the bytes of one of TransformerEngine's modules.

        Raises:
            StateFileError: they are damaged, or hold something that would have to be executed.
        """
        state = read_extra_state("a state dict", _STATE, saved)
        if not isinstance(state, dict) or "scale_fwd" not in state:
            return  # a recipe without a history
        settings = getattr(state.get("recipe"), "state", None) or {}
        fields = {name: settings[name] for name in _FIELDS if isinstance(settings.get(name), int | str)}
        e4m3 = format_maxima(settings.get("fp8_format")) == tuple(Format.E4M3.value)
        recipe = DelayedScaling(**fields, fp8_format=Format.E4M3 if e4m3 else Format.HYBRID).ottava
        for number, path in enumerate(layers):
            layer = self.get_submodule(path)
            assert isinstance(layer, QuantizedLayer)
            for door, spec in layer.quantizers.predicted(recipe):
                assert spec is not None
                door.prepare(spec, layer.weight.device)
            for direction, slots in _SLOTS.items():
                _fill(layer, state, direction, slots, number)


def _fill(layer: QuantizedLayer, read: Mapping[str, Any], direction: str, slots: Sequence[str], number: int) -> None:
    scale, history = read[f"scale_{direction}"], read[f"amax_history_{direction}"]
    for role, slot in enumerate(slots):
        door, column = getattr(layer.quantizers, slot, None), number * len(slots) + role
        if door is None or column >= len(scale):
            continue
        newest_first = history[1:, column].flip(0)  # row 0 is TransformerEngine's staging slot
        with torch.no_grad():
            door.amax_history.zero_()
            door.amax_history[: len(newest_first)].copy_(newest_first)
            if bool(newest_first.any()):
                door.scale.copy_(scale[column])


def _rename_out(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    assert isinstance(module, TEState)
    for own, parts in module._keys.items():
        if prefix + own not in state:
            continue
        tensor = state.pop(prefix + own)
        tensor = tensor[module._orders[own]] if own in module._orders else tensor
        if isinstance(parts, str):
            state[prefix + parts] = tensor
        else:  # views: what is written into them is written into the parameter
            stacked = parts[0][1] == 0
            pieces = tensor.unbind() if stacked else tensor.split([rows for _, rows in parts])
            state |= {prefix + name: piece for (name, _), piece in zip(parts, pieces, strict=True)}
    for path in module._states:
        state[_state_key(prefix, path)] = torch.empty(0, dtype=torch.uint8)  # as for recipes without a history


def _rename_in(
    module: nn.Module,
    state: dict[str, Any],
    prefix: str,
    metadata: Any,
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    assert isinstance(module, TEState)
    for own, parts in module._keys.items():
        names = [parts] if isinstance(parts, str) else [name for name, _ in parts]
        if all(prefix + name in state for name in names):
            pieces = [state.pop(prefix + name) for name in names]
            join = torch.stack if not isinstance(parts, str) and parts[0][1] == 0 else torch.cat
            whole = pieces[0] if isinstance(parts, str) else join(pieces)
            order = module._orders.get(own)
            state[prefix + own] = whole if order is None else whole[torch.tensor(order).argsort()]
    for path, layers in module._states.items():
        saved = state.pop(_state_key(prefix, path), None)
        try:
            module.take_history(saved, layers)
        except StateFileError as error:
            errors.append(f"{type(module).__name__}: {error}")


def _state_key(prefix: str, path: str) -> str:
    return f"{prefix}{path}.{_STATE}" if path else f"{prefix}{_STATE}"
