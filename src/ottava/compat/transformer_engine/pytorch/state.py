"""State dicts with TransformerEngine's keys: hooks rename keys at saving and loading, and `_extra_state` is read
without executing it.

Hooks load and write weights, norms and, for delayed scaling, histories and scales. TransformerEngine's history holds
amax_history_len - 1 steps, so the oldest entry is not written; no later scale needs it. The counts of ottava's doors
are not written either. A layer without a history has an empty `_extra_state`.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import partial
from itertools import product
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ottava.compat.transformer_engine.common.recipe import GROUPED, DelayedScaling, Format, asked_as
from ottava.compat.transformer_engine.pytorch.quantization import debug_tool
from ottava.compat.transformer_engine.pytorch.refused import ARGUMENTS
from ottava.engine.functional import QuantizedLayer, quantized_layers
from ottava.interop.contents import COLUMNS, StateFileError, format_maxima, read_extra_state
from ottava.numerics.formats import E4M3

_STATE = "_extra_state"
_THEIR_RECIPES = b"ctransformer_engine.common.recipe\n"
_RECIPE_FIELDS = tuple(one.name for one in fields(DelayedScaling) if one.name != "override_linear_precision")
"""Those of TransformerEngine 2.20, in our order."""
_FIELDS = ("margin", "amax_history_len", "amax_compute_algo")

Init = Callable[[Tensor], Any]
STD = 0.023
"""Standard deviation of TransformerEngine's initial weights."""
Parts = str | Sequence[tuple[str, int]]


_CASTS = "layer.last_call shows the recipe of its last forward, and ottava.watch(model) records every cast"
_ADVICE = (
    (f"{_CASTS}; the first forward makes the state of a recipe", "_get_quantizers quantizers init_fp8_metadata fp8 "
     "set_meta_tensor init_fp8_meta_tensors get_fp8_meta_tensors reset_fp8_meta_tensors fp8_meta fp8_initialized "
     "fp8_calibration fp8_meta_tensors_initialized prepare_forward prepare_forward_ctx end_forward is_debug_iter "
     "get_qkv_quantization_capabilities no_debug_features_active next_iter_when_debug_should_be_run"),
    ("ottava asks a CustomRecipe for the input, the weight and the gradient", "get_quantizer_roles"),
    ("outputs are in high precision", "output_quantizer_role"),
    ("gradients of inputs are in high precision", "grad_input_quantizer_role"),
    ("backward computes dgrad and wgrad together", "backward_dw wgrad_store need_backward_dw "
     "wgrad_accumulation_and_reduce_hooks register_wgrad_accumulation_and_reduce_hooks"),
    ("the recipe's amax_history_len counts; a new recipe makes a new history", "adjust_amax_history_length"),
    ("parameters have TransformerEngine's names and this rank's shapes; a weight's type and weight.high_precision tell "
     "how it is stored", "weight_names bias_names parameter_split_sizes size_per_partition primary_weights_in_fp8 "
     "preserve_high_precision_init_val param_init_meta fsdp_wrapped fsdp_group is_fsdp2 make_grouped_weights"),
    ("it serves TransformerEngine's kernels; leave it out. A receipt names the kernel of attention", "fwd_ln_sm_margin "
     "bwd_ln_sm_margin inf_ln_sm_margin gemm_bias_unfused_add gemm_gelu_fusion bias_gelu_nvfusion bias_dropout_fusion "
     "bias_dropout_add_exec_handler set_nccl_overlap_warning_if_tp ub_overlap_ag_fprop ub_overlap_rs_fprop "
     "ub_overlap_ag_dgrad flash_attention fused_attention unfused_attention deterministic logger onnx_forward"),
    ("the constructor takes it, and the module keeps it", "set_tensor_parallel_attributes set_tensor_parallel_group "
     "get_rng_state_tracker rng_tracker_name rng_states_tracker tp_group cp_size cp_rank softmax_offset"),
    ("assign attributes (layer.name = value); results have torch.autocast's dtype, or the input's", "fast_setattr "
     "module_setattr activation_dtype set_activation_dtype reset_layer_norm_parameters reset_parameters"),
)  # fmt: skip
INTERNALS: Mapping[str, str] = MappingProxyType(
    {name: reason for name, (_, reason) in ARGUMENTS.items()}
    | {name: text for text, names in _ADVICE for name in names.split()}
)
"""Attributes of TransformerEngine's modules that only its own code needs -> what to use."""


class Place:
    """A submodule of TransformerEngine that is a part of a module of ottava: parameters have its names.

    Other attributes, hooks and methods are those of ottava's submodule.

    Example:
        >>> import ottava.compat.transformer_engine.pytorch as te
        >>> layer = te.TransformerLayer(32, 64, 4)
        >>> layer.self_attention.layernorm_qkv.key_weight.shape, layer.layernorm_mlp.fc1_weight.shape
        (torch.Size([32, 32]), torch.Size([64, 32]))
    """

    def __init__(self, module: TEState, path: str) -> None:
        self.__dict__.update(_module=module, _path=path)

    def __getattr__(self, name: str) -> Any:
        try:
            return self._module.theirs(f"{self._path}.{name}")
        except KeyError:
            return getattr(self.real, name)

    def __setattr__(self, name: str, value: Any) -> None:
        theirs = f"{self._path}.{name}"
        if theirs in self._module._places:
            setattr(self._module, theirs, value)
        else:
            setattr(self.real, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.real(*args, **kwargs)

    def __repr__(self) -> str:
        return f"{self._path}: {self.real}"

    @property
    def real(self) -> nn.Module:
        """ottava's submodule."""
        path = self._module.our_path(self._path)
        assert path is not None
        return self._module.get_submodule(path)  # type: ignore[no-any-return]


class Advising(nn.Module):
    """A module with TransformerEngine's attributes: what its constructor was given, and advice about the others."""

    def remembers(self, given: Mapping[str, Any]) -> None:
        """Keeps plain arguments of a constructor, and what TransformerEngine makes of them, under names not in use."""
        plain = (bool, int, float, str, tuple, type(None), torch.dtype)
        one: dict[str, Any] = {n: v for n, v in given.items() if isinstance(v, plain) and n not in ("bias", "device")}
        shards = self.__dict__.get("_shards")
        ranks = 1 if shards is None else shards.size
        one |= {} if shards is None else {"tp_size": ranks, "sequence_parallel": shards.sequence}
        one |= {"params_dtype": one.get("params_dtype") or torch.get_default_dtype()}
        if (heads := one.get("num_attention_heads")) is not None:
            causal = "causal" in str(one.get("self_attn_mask_type", one.get("attn_mask_type")))
            one["num_gqa_groups"] = groups = one["num_gqa_groups"] or heads
            one["kv_channels"] = width = one["kv_channels"] or one["hidden_size"] // heads
            one["window_size"] = one["window_size"] or (-1, 0 if causal else -1)
            one |= {
                f"num_{n}_per_partition": v // ranks for n, v in (("attention_heads", heads), ("gqa_groups", groups))
            }
            one |= {f"hidden_size_per_attention_head{end}": width for end in ("", "_k", "_v")}
            one |= {"hidden_size_q": heads * width, "hidden_size_kv": groups * width}
        if (bias := given.get("bias")) is not None:
            one |= {"use_bias": bias, "apply_bias": bias and not one.setdefault("return_bias", False)}
        self.__dict__.update({name: value for name, value in one.items() if not hasattr(self, name)})

    def __getattr__(self, name: str) -> Any:
        """As torch's; of TransformerEngine's other attributes the error says what to use."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name not in INTERNALS:
                raise
            raise AttributeError(f"{type(self).__name__}.{name} is not in ottava: {INTERNALS[name]}") from None


class TEState(Advising):
    """Base class of modules with TransformerEngine's keys in their state dicts."""

    def uses_their_keys(
        self,
        keys: Mapping[str, Parts],
        states: Mapping[str, Sequence[str]],
        orders: Mapping[str, Sequence[int]] = MappingProxyType({}),
    ) -> None:
        """Registers the hooks that rename keys. A constructor calls this once, at its end.

        Args:
            keys: ottava's key -> TransformerEngine's key. A parameter that TransformerEngine splits has a sequence of
                (key, number of rows) instead.
            states: path of a TransformerEngine module that saves histories -> ottava's layers, in the order of its
                GEMMs.
            orders: ottava's key -> the order of its rows in TransformerEngine. The state dict then holds a copy.
        """
        self._keys, self._states, self._orders = dict(keys), dict(states), dict(orders)
        self._places: dict[str, tuple[str, slice | None]] = {}
        """TransformerEngine's key -> ours, and the rows of it; None: all."""
        for key, parts in keys.items():
            if isinstance(parts, str):
                self._places[parts] = key, None
                continue
            ends = list(itertools.accumulate(rows for _, rows in parts))
            self._places |= {name: (key, slice(end - rows, end)) for (name, rows), end in zip(parts, ends, strict=True)}
        self.register_state_dict_post_hook(_rename_out)
        self.register_load_state_dict_pre_hook(_rename_in)

    def __getattr__(self, name: str) -> Any:
        """Finds parameters and submodules by TransformerEngine's names, too."""
        own = (self.__dict__.get(kind, {}) for kind in ("_parameters", "_modules", "_buffers"))
        if "_places" in self.__dict__ and not any(name in of for of in own):
            with contextlib.suppress(KeyError):
                return self.theirs(name)
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Assigns a parameter by TransformerEngine's name, too; rows of a larger one are copied into it."""
        key, rows = self.__dict__.get("_places", {}).get(name, (name, None))
        if rows is not None and isinstance(value, Tensor):
            with torch.no_grad():
                self.theirs(name).copy_(value)
        elif key == name or rows is not None:
            super().__setattr__(name, value)
        else:
            path, _, last = key.rpartition(".")
            setattr(self.get_submodule(path), last, value)

    def theirs(self, name: str) -> Any:
        """What TransformerEngine has under a dotted name: a parameter, rows of one, or a `Place` below this module.

        Rows of a parameter are a view, with a view of the gradient that the whole parameter has now.

        Raises:
            KeyError: there is nothing of this name.
        """
        if name not in self._places:
            if self.our_path(name) is None:
                raise KeyError(name)
            return Place(self, name)
        key, rows = self._places[name]
        path, _, last = key.rpartition(".")
        whole = getattr(self.get_submodule(path), last)
        if rows is None or whole is None:
            return whole
        piece: Any = whole[rows]
        if whole.grad is not None:
            piece.grad = whole.grad[rows]
        return piece

    def our_path(self, theirs: str) -> str | None:
        """The submodule of ottava at a path of TransformerEngine; None: there is no such path."""
        start = f"{theirs}."
        below = [key.split(".")[:-1] for name, (key, _) in self._places.items() if name.startswith(start)]
        below += [path.split(".") for name, paths in self._states.items() if name == theirs for path in paths]
        if not below:
            return None
        same = itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*below, strict=False))
        return ".".join(parts[0] for parts in same)

    def named_modules(
        self, memo: Any = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """As torch's, but a norm in front of a linear layer comes before it: so parameters have TransformerEngine's
        order, by which optimizers number them."""
        found = list(super().named_modules(memo, prefix, remove_duplicate))
        for place, (name, module) in enumerate(found):
            if name.endswith("norm") and isinstance(module, nn.LayerNorm | nn.RMSNorm):
                layer = [other for other, _ in found[:place]].index(name.rpartition(".")[0])
                if isinstance(found[layer][1], QuantizedLayer):
                    found.insert(layer, found.pop(place))
        yield from found

    def names_layers(self, name: Any) -> None:
        """Gives the layers the names by which a CustomRecipe asks for their quantizers; None: they have none."""
        for theirs, paths in self._states.items() if name else ():
            for path in paths:
                last = path.rpartition(".")[2] if len(paths) > 1 and not path.startswith("groups.") else ""
                theirs = theirs.replace("layernorm_qkv", "layernorm_linear_qkv")
                full = ".".join(part for part in (name, theirs, last) if part)
                _layer(self, path).name = GROUPED + full if path.startswith("groups.") else full
        if (tool := debug_tool()) is not None and tool.on:
            for path in itertools.chain(*self._states.values()):
                tool.adopt(_layer(self, path), path.partition("groups.")[2])

    def starts(self, init_method: Init | None = None, output_layer_init_method: Init | None = None) -> None:
        """Fills in the initial values, and keeps how for `reset_parameters`: without a method normal weights; biases of
        0. The second method is for the layers in front of a residual sum.
        """
        # The module refers to itself: so it outlives a script that keeps only its weight, until that weight is cast.
        self.__dict__["_starts"] = partial(self.starts, init_method, output_layer_init_method)
        quantized = list(quantized_layers(self))
        for name, layer in self.named_modules():
            if layer in quantized and not layer.weight.is_meta:
                last = name.rpartition(".")[2] in ("out", "fc2")
                fill = (output_layer_init_method if last else init_method) or partial(nn.init.normal_, std=STD)
                with torch.no_grad():
                    fill(layer.weight)
                    if layer.bias is not None:
                        layer.bias.zero_()

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Fills in TransformerEngine's initial values again; on the device "meta", makes parameters on its own first.

        Args:
            defer_init: do nothing, as in TransformerEngine.
        """
        if defer_init or "_starts" not in self.__dict__:
            return
        if any(parameter.is_meta for parameter in self.parameters()):
            self.to_empty(device="cuda" if torch.cuda.is_available() else "cpu")
        for module in self.modules():
            if isinstance(module, nn.LayerNorm | nn.RMSNorm):
                module.reset_parameters()
        self._starts()

    def take_history(self, saved: Any, layers: Sequence[str]) -> None:
        """Loads histories and scales of delayed scaling from the `_extra_state` of a TransformerEngine module.

        Raises:
            StateFileError: the bytes are damaged, or hold an object that only executing them would build.
        """
        state = read_extra_state("a state dict", _STATE, saved)
        if not isinstance(state, dict) or "scale_fwd" not in state:
            return  # a recipe without a history
        settings = getattr(state.get("recipe"), "state", None) or {}
        fields = {name: settings[name] for name in _FIELDS if isinstance(settings.get(name), int | str)}
        e4m3 = format_maxima(settings.get("fp8_format")) == tuple(Format.E4M3.value)
        recipe = DelayedScaling(**fields, fp8_format=Format.E4M3 if e4m3 else Format.HYBRID).ottava
        for number, path in enumerate(layers):
            layer = _layer(self, path)
            for door, spec in layer.quantizers.predicted(recipe):
                assert spec is not None
                door.prepare(spec, layer.weight.device)
            for direction, slots in COLUMNS.items():
                _fill(layer, state, direction, slots, number)

    def give_history(self, layers: Sequence[str]) -> Tensor:
        """Writes the bytes that `take_history` and TransformerEngine load; none if no layer has a history.

        Returns:
            uint8 (n,) on the CPU: a pickle of tensors and of TransformerEngine's DelayedScaling.
        """
        state = self._histories(layers)
        if not state:
            return torch.empty(0, dtype=torch.uint8)  # as TransformerEngine writes for recipes without a history
        maxima = state["recipe"].fp8_format.value
        highest = {f"fp8_max_{direction}": float(getattr(maxima, f"max_{direction}")) for direction in COLUMNS}
        state["extra_fp8_variables"] = {"fp8_checkpoint": True, "num_gemms": len(layers), **highest}
        stream = io.BytesIO()
        _TheirPickler(stream, protocol=3).dump(state)  # the last protocol that writes a module's name as a line
        data = stream.getvalue().replace(f"c{DelayedScaling.__module__}\n".encode(), _THEIR_RECIPES)
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)

    @property
    def fp8_meta(self) -> dict[str, Any]:
        """TransformerEngine's state of a linear layer, for scripts that read it: a copy, with the recipe of the last
        forward, and of delayed scaling histories and scales, "scaling_fwd" and "scaling_bwd"."""
        layers = self.__dict__.get("_states", {}).get("")
        if layers is None:
            raise AttributeError("fp8_meta")  # its parts have states of their own
        call, state = _layer(self, layers[0]).last_call, self._histories(layers)
        found: dict[str, Any] = {"fp8_checkpoint": bool(state), "num_gemms": len(layers)}
        found["recipe"] = next(iter(asked_as(None if call is None else call.recipe)), None)
        for direction in COLUMNS if state else ():
            parts = {name: state[f"{name}_{direction}"] for name in ("scale", "amax_history")}
            found[f"scaling_{direction}"] = SimpleNamespace(**parts)
        return found

    def _histories(self, layers: Sequence[str]) -> dict[str, Any]:
        """Recipe, scales and histories in TransformerEngine's layout; {}: no layer has a history."""
        parts = [_layer(self, path).quantizers for path in layers]
        doors = [door for part in parts for door in part.doors if door.spec is not None]
        if not doors or doors[0].scale.is_meta:
            return {}
        rows = max(len(door.amax_history) for door in doors)
        formats = {part.grad_output.spec.format for part in parts if part.grad_output.spec is not None}
        settings = {name: getattr(doors[0].spec, name) for name in _FIELDS} | {"amax_history_len": rows}
        if callable(settings["amax_compute_algo"]):  # TransformerEngine's loader cannot import a function of ottava
            settings["amax_compute_algo"] = "max"
        recipe = DelayedScaling(**settings, fp8_format=Format.E4M3 if formats == {E4M3} else Format.HYBRID)
        state: dict[str, Any] = {"recipe": recipe}
        for direction, slots in COLUMNS.items():
            columns = len(parts) * len(slots)
            scale, history = torch.ones(columns, dtype=torch.float32), torch.zeros(rows, columns, dtype=torch.float32)
            for column, (part, slot) in enumerate(product(parts, slots)):
                door = getattr(part, slot, None)
                if door is None or door.spec is None:
                    continue
                oldest_first = door.amax_history[: rows - 1].flip(0)
                history[rows - len(oldest_first) :, column] = oldest_first
                history[0, column] = door.staged[0]  # TransformerEngine's staging slot
                scale[column] = door.scale if bool(door.scale) else 1.0  # where TransformerEngine's scales start
            state |= {f"scale_{direction}": scale, f"amax_history_{direction}": history}
        return state


class _TheirPickler(pickle.Pickler):
    """Pickles recipes so that TransformerEngine's classes of the same names load them."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Format):
            return Format, (tuple(value.value),)
        if isinstance(value, DelayedScaling):
            return DelayedScaling, (), {name: getattr(value, name) for name in _RECIPE_FIELDS}
        return NotImplemented


TransformerEngineBaseModule = TEState
"""TransformerEngine's name of its base class, which scripts ask isinstance for."""


def _layer(module: nn.Module, path: str) -> QuantizedLayer:
    layer = module.get_submodule(path)
    assert isinstance(layer, QuantizedLayer)
    return layer


def _fill(layer: QuantizedLayer, read: Mapping[str, Any], direction: str, slots: Sequence[str], number: int) -> None:
    scale, history = read[f"scale_{direction}"], read[f"amax_history_{direction}"]
    for role, slot in enumerate(slots):
        door, column = getattr(layer.quantizers, slot, None), number * len(slots) + role
        if door is None or column >= len(scale):
            continue
        newest_first = history[1:, column].flip(0)
        with torch.no_grad():
            door.reset()
            door.staged[0] = history[0, column]
            door.amax_history[: len(newest_first)].copy_(newest_first)
            if bool(newest_first.any()) or float(scale[column]) != 1:  # a history of length 1 is only the staging slot
                door.scale.copy_(scale[column])


def _rename_out(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    assert isinstance(module, TEState)
    for key, parts in module._keys.items():
        if prefix + key not in state:
            continue
        tensor = state.pop(prefix + key)
        tensor = tensor[module._orders[key]] if key in module._orders else tensor
        if isinstance(parts, str):
            state[prefix + parts] = tensor
        else:  # views: writing into them writes into the parameter
            pieces = tensor.split([rows for _, rows in parts])
            state |= {prefix + name: piece for (name, _), piece in zip(parts, pieces, strict=True)}
    for path, layers in module._states.items():
        for layer in layers:
            ours = _key(prefix, layer, "quantizers.")
            for name in [name for name in state if name.startswith(ours)]:
                del state[name]
        state[_key(prefix, path, _STATE)] = module.give_history(layers)


def _rename_in(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any, *found: Any) -> None:
    assert isinstance(module, TEState)
    for key, parts in module._keys.items():
        names = [parts] if isinstance(parts, str) else [name for name, _ in parts]
        if all(prefix + name in state for name in names):
            pieces = [state.pop(prefix + name) for name in names]
            whole = pieces[0] if isinstance(parts, str) else torch.cat(pieces)
            order = module._orders.get(key)
            state[prefix + key] = whole if order is None else whole[torch.tensor(order).argsort()]
    for path, layers in module._states.items():
        saved = state.pop(_key(prefix, path, _STATE), None)
        try:
            module.take_history(saved, layers)
        except StateFileError as error:
            found[-1].append(f"{type(module).__name__}: {error}")  # torch's list of errors


def _key(prefix: str, path: str, name: str) -> str:
    return f"{prefix}{path}.{name}" if path else f"{prefix}{name}"
