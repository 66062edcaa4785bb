"""What a checkpoint is made of: the tensors of a model or of a folder, under the names that engines know.

A `Weight` knows the cast that the trained forward used, so that the same codes can be written. Hugging Face's models
give the names of their own checkpoints; a run of `ottava train` becomes a Llama, whose formula its model has.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ottava.base.errors import need
from ottava.base.untrusted import UntrustedError
from ottava.engine.functional import QuantizedLayer
from ottava.nn.foreign import TurnedLinear, parts_of
from ottava.nn.plan import default_filter
from ottava.numerics.scaling import Granularity
from ottava.numerics.tensor import QuantizationSpec, QuantizedTensor
from ottava.weights.layouts import (
    INPUT_KEYS,
    is_codes,
    is_scale,
    open_tensors,
    read_codes,
    read_config,
    read_quantization,
    scales_of,
)
from ottava.weights.parameter import QuantizedWeight, is_quantized_weight

_EXPERT = re.compile(r"\.experts\.(?P<number>\d+)\.")
_TURNED = "it is a Conv1D, which holds W.T, and engines cast nn.Linear only"
_OTHERS = ("embed", "wte", "wpe", "norm", "position", "rotary", "relative_attention_bias")


class Unread(NamedTuple):
    """What stays in its file until somebody calls `read`."""

    shape: tuple[int, ...]
    read: Callable[[], Any]


@dataclass(frozen=True, eq=False)
class Weight:
    """A tensor of a checkpoint."""

    name: str
    """In the checkpoint."""
    values: Tensor | Unread
    """Its numbers, or where they are."""
    linear: bool = False
    """Whether it is the weight of a linear (N, K)."""
    stays: str = ""
    """Why a linear stays in high precision; "" if it is to be quantized."""
    codes: QuantizedTensor | Unread | None = None
    """Its cast in the trained forward, or where it is."""
    input_scale_inv: float | None = None
    """scale_inv of the activations, from a history."""
    input_spec: QuantizationSpec | None = None
    """The cast of its input in the trained forward."""
    layer: str = ""
    """The layer that multiplies it in training."""

    @property
    def tensor(self) -> Tensor:
        """Its numbers; of a weight that exists only in FP8 the decoded ones. Read anew at each look, if in a file."""
        return self.values.read() if isinstance(self.values, Unread) else self.values

    @property
    def cast(self) -> QuantizedTensor | None:
        """Its cast in the trained forward; None: it has none."""
        return self.codes.read() if isinstance(self.codes, Unread) else self.codes

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor, which is not read for it."""
        return tuple(self.values.shape)

    @property
    def module(self) -> str:
        """Name of the module that holds it."""
        return self.name.rpartition(".")[0]


@dataclass(frozen=True)
class Source:
    """The content of a checkpoint before it is quantized."""

    weights: tuple[Weight, ...]
    config: Mapping[str, Any]
    """Of config.json, without a quantization_config."""
    files: tuple[Path, ...] = ()
    """Other files to copy: tokenizer, generation settings, templates."""


Chosen = Callable[[str, nn.Module], str]


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
            weights.append(Weight(name, tensor, True, _TURNED))
        elif layer is not None:
            weights.append(_of_layer(name, tensor, layer, converted=converted))
        else:
            weights.append(_of_stack(name, tensor, parts, converted=converted))
    return Source(tuple(weights), config)


def _of_layer(name: str, tensor: Tensor, layer: nn.Module, *, converted: bool) -> Weight:
    stays = ""
    cast, input_scale_inv, input_spec = None, None, None
    if isinstance(layer, QuantizedLayer) and (converted or is_quantized_weight(layer.weight)):
        cast, input_scale_inv = cast_of(layer), input_scale_of(layer)
        input_spec = layer.resolved.fprop.lhs
        stays = "" if cast is not None else f"recipe {layer.resolved.name!r} does not cast it"
        stays = _TURNED if isinstance(layer, TurnedLinear) else stays
    elif converted:
        stays = "it was not converted"
    else:
        linear: Any = layer
        stays = default_filter(name.removesuffix(".weight"), linear) or ""
    return Weight(name, tensor, True, stays, cast, input_scale_inv, input_spec, name.removesuffix(".weight"))


def _parts(model: nn.Module) -> dict[int, list[QuantizedLayer]]:
    """Layers whose weight is a piece of a stack, by the number of their expert."""
    parts: dict[int, list[QuantizedLayer]] = {}
    for module in model.modules():
        if isinstance(module, QuantizedLayer) and module.parameter is not module.weight:
            number = module.name.rpartition(".")[2]
            parts.setdefault(int(number) if number.isdecimal() else -1, []).append(module)
    return parts


def _of_stack(name: str, tensor: Tensor, parts: Mapping[int, list[QuantizedLayer]], *, converted: bool) -> Weight:
    """A tensor that no module of this name holds: an expert that the model keeps in a stack, a router, or no linear."""
    match = _EXPERT.search(name)
    if not name.endswith(".weight") or tensor.ndim != 2 or match is None:
        return _of_file(name, tensor, only_routers=True)
    for part in parts.get(int(match["number"]), ()):
        rows = _rows_of(tensor, numbers(part.weight))
        if rows is not None and (cast := cast_of(part)) is not None:
            own = input_scale_of(part), part.resolved.fprop.lhs, part.name
            return Weight(name, tensor, True, "", rows_of_cast(cast, rows), *own)
    return Weight(name, tensor, True, "it was not converted" if converted else "")


def _rows_of(tensor: Tensor, whole: Tensor) -> slice | None:
    """The rows of `whole` that `tensor` is: experts are kept with gate and up in one matrix."""
    size = tensor.shape[0]
    if tensor.shape[1] != whole.shape[1] or not size or whole.shape[0] % size:
        return None
    starts = range(0, whole.shape[0], size)
    return next((slice(i, i + size) for i in starts if torch.equal(whole[i : i + size], tensor)), None)


def rows_of_cast(cast: QuantizedTensor, rows: slice) -> QuantizedTensor | None:
    """The cast of some rows of a matrix; None if a block reaches beyond them.

    Example:
        >>> from ottava.ops.quantize import quantize
        >>> from ottava.numerics.formats import E4M3
        >>> from ottava.numerics.tensor import QuantizationSpec
        >>> from ottava.numerics.scaling import PER_ROW
        >>> whole = quantize(torch.randn(6, 8), QuantizationSpec(E4M3, PER_ROW))
        >>> part = rows_of_cast(whole, slice(2, 4))
        >>> torch.equal(part.dequantize(), whole.dequantize()[2:4])
        True
    """
    block = cast.spec.granularity.rows
    scale_inv = cast.scale_inv
    if block is not None:
        if rows.start % block or (rows.stop % block and rows.stop != cast.shape[0]):
            return None
        scale_inv = scale_inv[rows.start // block : -(-rows.stop // block)]
    return QuantizedTensor(cast.data[rows], scale_inv, cast.spec, cast.dtype)


def same_numbers(a: QuantizedTensor, b: QuantizedTensor) -> bool:
    """Whether two casts stand for the same numbers, bit for bit; codes and scales may differ.

    A weight in MXFP8 that is decoded and cast again keeps every number. Where the largest one of a block was rounded
    down to a power of two times 448, the block gets half of its scale, and other codes.

    Example:
        >>> from ottava.ops.quantize import quantize
        >>> from ottava.numerics.formats import E4M3
        >>> from ottava.numerics.scaling import BLOCK_1X32
        >>> spec = QuantizationSpec(E4M3, BLOCK_1X32, "e8m0")
        >>> one = quantize(torch.full((1, 32), 450.0), spec)
        >>> two = quantize(one.dequantize(), spec)
        >>> same_numbers(one, two), float(one.scale_inv), float(two.scale_inv)
        (True, 2.0, 1.0)
    """
    return torch.equal(a.dequantize(torch.float32).cpu(), b.dequantize(torch.float32).cpu())


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
    names = {id(p): name for name, p in model.named_parameters(remove_duplicate=True)}
    state: dict[str, Tensor] = {}
    for name, tensor in (*model.named_parameters(remove_duplicate=True), *_buffers(model)):
        if isinstance(tensor, nn.Parameter) and names.get(id(tensor)) != name:
            continue
        value: Any = tensor.detach() if not isinstance(tensor, QuantizedWeight) else tensor
        if hasattr(value, "full_tensor"):
            value = value.full_tensor()
        state[name] = numbers(value)
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


def of_folder(folder: Path) -> Source:
    """The checkpoint in a folder of Hugging Face's: in high precision, or in FP8 as `load_fp8` reads it.

    No tensor is read before somebody looks at it, and none is kept then.

    Raises:
        UntrustedError: the folder is damaged, or quantized in another way.
    """
    if not (folder / "config.json").is_file():
        raise UntrustedError(f"{folder} has no config.json; needs a checkpoint or a run of ottava train")
    try:
        config = read_config(folder)
        said = config.pop("quantization_config", None)
        sizes = read_quantization(said).blocks if said else ()
        with ExitStack() as files:
            tensors = open_tensors(folder, files)
            turned = turned_names({n: tuple(file.get_slice(n).get_shape()) for n, file in tensors.items()})
            weights = [_of_codes(name, tensors, sizes) if is_codes(name, tensors) else _in_file(name, tensors, turned)
                       for name in tensors if not is_scale(name, tensors)]  # fmt: skip
            files.pop_all()  # the tensors' readers hold the files, which close with the last of them
    except (UntrustedError, OSError) as error:
        raise UntrustedError(f"{folder} cannot be read: {error}") from error
    return Source(tuple(weights), config, other_files(folder))


def turned_names(shapes: Mapping[str, tuple[int, ...]]) -> set[str]:
    """The last names of the modules that are Conv1Ds: somewhere the length of a bias is that of the columns only.

    Args:
        shapes: of all tensors of a checkpoint, by name.

    Example:
        >>> turned_names({"h.0.c_fc.weight": (8, 32), "h.0.c_fc.bias": (32,)})
        {'c_fc'}
    """
    found: dict[str, list[tuple[bool, bool]]] = {}
    for name, shape in shapes.items():
        bias = shapes.get(f"{name.removesuffix('weight')}bias", ())
        if name.endswith(".weight") and len(shape) == 2 and len(bias) == 1:
            found.setdefault(name.split(".")[-2], []).append((bias[0] == shape[0], bias[0] == shape[1]))
    return {last for last, fits in found.items() if (False, True) in fits and all(cols for _, cols in fits)}


def _in_file(name: str, tensors: Mapping[str, Any], turned: Collection[str]) -> Weight:
    file = tensors[name]
    weight = _of_file(name, Unread(tuple(file.get_slice(name).get_shape()), partial(file.get_tensor, name)))
    is_turned = weight.linear and weight.module.rpartition(".")[2] in turned
    return replace(weight, stays=_TURNED) if is_turned else weight


def _of_codes(name: str, tensors: Mapping[str, Any], sizes: Sequence[Granularity]) -> Weight:
    scale_inv, spec = scales_of(name, tensors, sizes)
    file = tensors[name]
    shape = tuple(file.get_slice(name).get_shape())

    def codes() -> QuantizedTensor:
        return QuantizedTensor(read_codes(name, tensors), scale_inv, spec, torch.bfloat16)

    decoded = Unread(shape, lambda: codes().dequantize(torch.float32))
    static = next((key for last in INPUT_KEYS if (key := name.removesuffix("weight") + last) in tensors), None)
    scale = None if static is None else float(tensors[static].get_tensor(static).float().amax())
    return Weight(name, decoded, True, "", Unread(shape, codes), scale)


def is_linear(name: str, shape: Sequence[int]) -> bool:
    """Whether a tensor of a file is a linear's weight: every matrix is, unless its name says otherwise."""
    last = name.lower().removesuffix(".weight").rpartition(".")[2]
    return name.endswith(".weight") and len(shape) == 2 and not any(word in last for word in _OTHERS)


def _of_file(name: str, tensor: Tensor | Unread, *, only_routers: bool = False) -> Weight:
    module = name.removesuffix(".weight")
    if not is_linear(name, tensor.shape):
        return Weight(name, tensor)
    with torch.device("meta"):
        like = nn.Linear(tensor.shape[1], tensor.shape[0], bias=False)
    stays = default_filter(module, like) or ""
    return Weight(name, tensor) if only_routers and not stays else Weight(name, tensor, True, stays)


def other_files(folder: Path) -> tuple[Path, ...]:
    """The files of a checkpoint that are neither weights nor config.json."""
    return tuple(
        path
        for path in sorted(folder.iterdir())
        if path.is_file()
        and path.name != "config.json"
        and path.suffix in (".json", ".txt", ".model", ".jinja", ".py", ".md", ".tiktoken")
        and "safetensors" not in path.name
        and path.name != "export.json"
    )


def copy_files(source: Source, folder: Path) -> None:
    """Copies the other files of a checkpoint."""
    for path in source.files:
        shutil.copy2(path, folder / path.name)
