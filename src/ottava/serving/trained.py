"""The checkpoint of a model in memory: converted by ottava, by nobody, or with weights that exist only in FP8.

Hugging Face's models give the names of their own checkpoints; a run of `ottava train` becomes a Llama, whose formula
its model has.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ottava.base.errors import need
from ottava.base.text import grouped
from ottava.engine.functional import QuantizedLayer
from ottava.nn.foreign import TurnedLinear, parts_of
from ottava.numerics.tensor import QuantizedTensor
from ottava.recipe import default_filter
from ottava.serving.source import TURNED, Source, Weight, of_file
from ottava.weights.parameter import QuantizedWeight, is_quantized_weight

_EXPERT = re.compile(r"\.experts\.(?P<number>\d+)\.")


def of_model(model: nn.Module, config: Mapping[str, Any] | None = None) -> Source:
    """The checkpoint of a model: converted by ottava, by nobody, or with weights that exist only in FP8.

    Args:
        config: of config.json; None: the model's own (Hugging Face), or that of a Llama for our trainer's model.
    Raises:
        ValueError: a model without a config, or without numbers (on the meta device).
    """
    need("export", model, nn.Module, "a model, or the folder of a checkpoint or of a run")
    for name, module in model.named_modules():
        if isinstance(getattr(module, "smooth", None), Tensor):
            raise ValueError(
                f"export: {name} has factors of smooth_swiglu, which engines do not know; call "
                "ottava.nn.fold_smooth_swiglu(model) first"
            )
    if unmade := [name for name, parameter in model.named_parameters() if parameter.is_meta]:
        raise ValueError(f"export: {unmade[0]} is on the meta device and has no numbers; load a checkpoint first")
    layers = {name: module for name, module in model.named_modules() if isinstance(module, (QuantizedLayer, nn.Linear))}
    turned = {name for name, module in model.named_modules() if name not in layers and "" in parts_of(module)}
    converted = any(isinstance(module, QuantizedLayer) and module.resolved.quantized for module in layers.values())
    own: Any = getattr(model, "config", None)
    if config is None:
        if not hasattr(own, "to_dict"):
            raise ValueError(
                f"export: {type(model).__name__} has no config of Hugging Face's; give config={{...}}, the content of "
                "config.json that engines need"
            )
        config = {k: v for k, v in own.to_dict().items() if k != "quantization_config"}
        config["architectures"] = [type(model).__name__.removeprefix("FSDP")]
        config["dtype"] = "bfloat16"
    state = _in_high_precision(model)
    if hasattr(own, "to_dict"):
        state = _as_on_disk(model, state)
    parts = _parts(model)
    weights = []
    for name, tensor in state.items():
        module = name.rpartition(".")[0]
        layer = layers.get(module) if name.endswith(".weight") else None
        if layer is None and name.endswith(".weight") and module in turned:
            weights.append(Weight(name, tensor, True, TURNED))
        elif layer is not None:
            weights.append(_of_layer(name, tensor, layer, converted=converted))
        else:
            weights.append(_of_stack(name, tensor, parts, converted=converted))
    return Source(tuple(weights), config)


def _of_layer(name: str, tensor: Tensor, layer: nn.Module, *, converted: bool) -> Weight:
    stays, cast, input_scale_inv, input_spec = "", None, None, None
    if isinstance(layer, QuantizedLayer) and (converted or is_quantized_weight(layer.weight)):
        cast, input_scale_inv = cast_of(layer), input_scale_of(layer)
        input_spec = layer.resolved.fprop.lhs
        stays = "" if cast is not None else f"recipe {layer.resolved.name!r} does not cast it"
        stays = TURNED if isinstance(layer, TurnedLinear) else stays
    elif converted:
        stays = "it was not converted"
    else:
        linear: Any = layer
        stays = default_filter(name.removesuffix(".weight"), linear) or ""
    return Weight(name, tensor, True, stays, cast, input_scale_inv, input_spec, name.removesuffix(".weight"))


def _parts(model: nn.Module) -> dict[int, list[QuantizedLayer]]:
    """Layers whose weight is a piece of a stack, by the number of their expert."""
    layers = [one for one in model.modules() if isinstance(one, QuantizedLayer) and one.parameter is not one.weight]
    lasts = [one.name.rpartition(".")[2] for one in layers]
    return grouped((int(last) if last.isdecimal() else -1, one) for last, one in zip(lasts, layers, strict=True))


def _of_stack(name: str, tensor: Tensor, parts: Mapping[int, list[QuantizedLayer]], *, converted: bool) -> Weight:
    """A tensor that no module of this name holds: an expert that the model keeps in a stack, a router, or no linear."""
    match = _EXPERT.search(name)
    if not name.endswith(".weight") or tensor.ndim != 2 or match is None:
        return of_file(name, tensor, only_routers=True)
    for part in parts.get(int(match["number"]), ()):
        rows = _rows_of(tensor, numbers(part.weight))
        if rows is not None and (cast := cast_of(part)) is not None:
            own = input_scale_of(part), part.resolved.fprop.lhs, part.name
            return Weight(name, tensor, True, "", cast.part(0, rows.start, rows.stop), *own)
    return Weight(name, tensor, True, "it was not converted" if converted else "")


def _rows_of(tensor: Tensor, whole: Tensor) -> slice | None:
    """The rows of `whole` that `tensor` is: experts are kept with gate and up in one matrix."""
    size = tensor.shape[0]
    if tensor.shape[1] != whole.shape[1] or not size or whole.shape[0] % size:
        return None
    starts = range(0, whole.shape[0], size)
    return next((slice(i, i + size) for i in starts if torch.equal(whole[i : i + size], tensor)), None)


def cast_of(layer: QuantizedLayer) -> QuantizedTensor | None:
    """The operand of the weight that a forward of this layer multiplies now; None if it casts none.

    That of a Conv1D lies as its weight does, (K, N): its blocks are those of the transpose. A weight that exists only
    as codes is these codes, also where a recipe multiplies their numbers.
    """
    row, col = layer.resolved.cells("weight")
    if row is None:
        return layer.weight.quantized() if isinstance(layer.weight, QuantizedWeight) else None
    turned = isinstance(layer, TurnedLinear)
    weight = layer.weight.t() if turned else layer.weight
    with torch.no_grad():
        operand, _ = layer.quantizers.weight(weight, row, col, columnwise=False, record=False)
    if not isinstance(operand, QuantizedTensor):
        return None
    if not turned:
        return operand
    return QuantizedTensor(operand.data.t(), operand.scale_inv.t(), operand.spec.transposed, operand.dtype)


def input_scale_of(layer: QuantizedLayer) -> float | None:
    """scale_inv that the history of the layer's input predicts; None without a history."""
    door: Any = layer.quantizers.input
    if door.spec is None or not bool(door.amax_history.any()):
        return None
    return float(1 / door.scale.reshape(-1)[0])


def _in_high_precision(model: nn.Module) -> dict[str, Tensor]:
    """The state dict with numbers in place of codes; tied parameters stay one tensor."""
    state: dict[str, Tensor] = {}
    for name, tensor in (*model.named_parameters(), *_buffers(model)):
        value: Any = tensor.detach() if not isinstance(tensor, QuantizedWeight) else tensor
        state[name] = numbers(value.full_tensor() if hasattr(value, "full_tensor") else value)
    return state


def numbers(value: Any) -> Tensor:
    """The numbers of a parameter; of codes the copy in high precision, if the model keeps one."""
    if not is_quantized_weight(value):
        return value  # type: ignore[no-any-return]
    kept = value.high_precision
    return value.dequantize() if kept is None else kept


def _buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for prefix, module in model.named_modules():
        if isinstance(module, QuantizedLayer) or any(part == "quantizers" for part in prefix.split(".")):
            continue  # scales and histories of training
        for own, buffer in module._buffers.items():
            if buffer is not None and own not in module._non_persistent_buffers_set:
                yield (f"{prefix}.{own}" if prefix else own), buffer


def _as_on_disk(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Names and shapes of Hugging Face's checkpoints: experts that a model holds stacked are apart there."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        return state
    plain: Any = model
    return dict(revert_weight_conversion(plain, state))
