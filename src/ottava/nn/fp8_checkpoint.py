"""`load_fp8` puts the codes of a published FP8 checkpoint into a model: frozen, to train on, or decoded.

It reads three families of folders: Hugging Face's "fp8" (blocks of 128 x 128, or one scale a tensor, under
weight_scale_inv; "mxfp8" beside it), "compressed-tensors" (tensor, channel, block or groups of 32, under weight_scale;
FP4 in groups of 32, or of 16 beside a scale of the tensor), and "modelopt" (one scale a tensor). A stored scale is the
factor that dequantizes; only that of an FP4 tensor quantizes. It checks everything before it changes anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from ottava.base.errors import need, unknown_name
from ottava.base.untrusted import UntrustedError, misfit, parse_json, read_text, regular_size
from ottava.engine.quantizer import Quantizer
from ottava.nn.convert import convert, put_weight
from ottava.numerics.formats import E2M1, E4M3
from ottava.numerics.scaling import BLOCK_1X32, PER_ROW, PER_TENSOR, Granularity, ScaleFormat
from ottava.numerics.tensor import QuantizationSpec
from ottava.recipe import Recipe, get_recipe
from ottava.weights.checkpoint import keep_in_state_dict
from ottava.weights.operands import refuse_weight
from ottava.weights.parameter import FLOATS, QuantizedWeight, fit_bytes, powers_only, store_scales

_SCALES = ("weight_scale_inv", "weight_scale")
_UNUSED = ("input_scale", "activation_scale", "k_scale", "v_scale", "output_scale")
"""Scales of activations; not used, because casts compute their own."""
_METHODS = ("fp8", "mxfp8", "compressed-tensors", "modelopt")
_SHAPE = MappingProxyType(
    {
        "quant_method": str,
        "weight_block_size": [int],
        "config_groups": {"*": {"weights": {"num_bits": int, "type": str, "strategy": str, "block_structure": [int]}}},
    }
)
_SHOWN = 3
_FP4 = "F4_E2M1"

Loaded = Literal["frozen", "fp8", "bf16"]
"""What `load_fp8` makes of FP8 weights."""


@dataclass(frozen=True)
class LoadReport:
    """The result of `load_fp8`: the tensors that it has put into a model."""

    folder: Path
    """The folder of the checkpoint."""
    stored: Mapping[str, QuantizationSpec]
    """Full names of the weights that stay codes, with the spec of their cast."""
    plain: tuple[str, ...]
    """Full names of the other tensors."""
    nbytes: int
    """Bytes of the stored weights."""
    bf16_bytes: int
    """Bytes that they would have in BF16."""

    def __str__(self) -> str:
        kinds = ", ".join(sorted({str(spec) for spec in self.stored.values()}))
        return (
            f"{self.folder}: {len(self.stored)} weights as {kinds}, {self.nbytes:,} bytes instead of "
            f"{self.bf16_bytes:,} in BF16; {len(self.plain)} other tensors"
        )


class _Place(NamedTuple):
    """The parameter or buffer for a tensor of the checkpoint."""

    full: str
    module: nn.Module
    own: str


class _Stored(NamedTuple):
    place: _Place
    key: str
    scales: Tensor
    spec: QuantizationSpec


def load_fp8(
    model: nn.Module,
    folder: Path | str,
    *,
    recipe: Recipe | str = "bf16",
    device: torch.device | str | None = None,
    weights: Loaded = "frozen",
) -> LoadReport:
    """Loads a published FP8 checkpoint into a model; its FP8 weights stay codes, frozen or trained, or are decoded.

    Args:
        model: of the checkpoint's architecture, with its names; with or without PEFT's wrapper. Its parameters may be
            on the meta device, so that it never exists in high precision; layers compute in their dtype.
        folder: config.json with a quantization_config, and model.safetensors or its index and shards.
        recipe: for the layers. "bf16" decodes each weight in forward and again in backward, and gives the bits of
            a layer with the dequantized weight. A recipe whose weight cell has these scales multiplies the
            codes themselves ("blockwise_fp32" for blocks of 128 x 128; "blockwise" if they are powers of two).
        device: for parameters on meta; None: the CPU.
        weights: "frozen" for adapters; "fp8" trains on with the codes as primary weights (docs/weights.md), where the
            model's parameters require gradients; "bf16" decodes them, each number rounded once to the model's dtype.
    Returns:
        LoadReport.
    Raises:
        UntrustedError (a ValueError): the folder is damaged, of an unknown kind, or of another model; or nothing fills
            a buffer on meta. The model is unchanged then.  ValueError: a recipe that cannot use the codes.
    Edge cases: it does not use scales of activations. It loads tensors in high precision into parameters and buffers of
        the same name, which stay trainable or frozen. A tied head may be absent. Buffers on meta that no checkpoint has
        (tables of frequencies) are computed by the `_init_weights` of Hugging Face's models.
    """
    need("load_fp8", model, nn.Module)
    if weights not in get_args(Loaded):
        raise ValueError(f"load_fp8: {unknown_name('weights', weights, get_args(Loaded))}")
    if not isinstance(folder, str):
        need("load_fp8", folder, PathLike, "a path: the folder of a published checkpoint")
    folder, recipe = Path(folder), get_recipe(recipe)
    try:
        with ExitStack() as files:
            sizes = block_sizes(_config(folder))
            tensors = open_tensors(folder, files)
            places = _places(model)
            stored = list(_stored(tensors, places, sizes))
            plain = _plain(tensors, places, {one.key for one in stored})
            for one in stored:
                read_codes(one.key, tensors)
            _check_whole(model, [one.place for one in stored] + [place for place, _ in plain])
            for one in stored:
                row, col = recipe.for_layer(one.place.full.rpartition(".")[0]).cells("weight")
                if weights != "bf16" and row is not None and (reason := refuse_weight(one.spec, row, col)):
                    raise ValueError(f"load_fp8: recipe {recipe.name!r} cannot use {one.key}: {reason}. Take 'bf16'")
            _fill_buffers(model, {id(getattr(place.module, place.own)) for place, _ in plain}, device)
            return _put_in(model, folder, recipe, stored, plain, tensors, device, weights)
    except UntrustedError as error:
        raise UntrustedError(f"load_fp8: {folder}: {error}") from error
    except OSError as error:
        raise UntrustedError(f"load_fp8: {folder}: {error.filename or ''} cannot be read: {error.strerror}") from error


def _config(folder: Path) -> Mapping[str, Any]:
    if not folder.is_dir():
        raise UntrustedError("is no folder; needs one with config.json and model.safetensors")
    path = folder / "config.json"
    if not path.exists():
        raise UntrustedError("has no config.json; needs the folder that was published, as a whole")
    try:
        config = parse_json(read_text(path))
    except UntrustedError as error:
        raise UntrustedError(f"config.json {error}") from error
    found = config.get("quantization_config") if isinstance(config, dict) else None
    if not isinstance(found, dict):
        raise UntrustedError(
            "config.json has no quantization_config: its weights are not quantized; use from_pretrained"
        )
    return found


def block_sizes(config: Mapping[str, Any]) -> list[Granularity]:
    """The sizes of blocks that a quantization_config allows.

    Raises:
        UntrustedError: an unknown method, or one without FP8 weights.
    """
    if wrong := misfit(config, _SHAPE, "quantization_config"):
        raise UntrustedError(f"config.json: {wrong}")
    method = config.get("quant_method")
    if method not in _METHODS:
        raise UntrustedError(f"config.json: {unknown_name('quant_method', method, _METHODS)}")
    if method != "compressed-tensors":
        block = config.get("weight_block_size")
        return [_block(block) if block else PER_TENSOR]
    sizes = []
    for group in (config.get("config_groups") or {}).values():
        weights = (group or {}).get("weights") or {}
        strategy = weights.get("strategy")
        if weights.get("type") != "float" or weights.get("num_bits") not in (4, 8):
            raise UntrustedError(
                f"config.json: weights of {weights.get('num_bits')} bits, type {weights.get('type')!r}; only FP8 and "
                "FP4 are read (8 or 4 bits, 'float')"
            )
        kinds = {"tensor": PER_TENSOR, "channel": PER_ROW}
        if strategy == "block":
            sizes.append(_block(weights.get("block_structure")))
        elif strategy in ("group", "tensor_group"):
            sizes.append(_block([1, weights.get("group_size")]))
        elif strategy in kinds:
            sizes.append(kinds[strategy])
        else:
            raise UntrustedError(
                f"config.json: {unknown_name('strategy', strategy, (*kinds, 'block', 'group', 'tensor_group'))}"
            )
    if not sizes:
        raise UntrustedError(
            "config.json: compressed-tensors without config_groups; needs one with its weights' strategy"
        )
    return sizes


def _block(block: Any) -> Granularity:
    try:
        rows, cols = block
        return Granularity(rows, cols)
    except (TypeError, ValueError) as error:
        raise UntrustedError(f"config.json: block size {block!r}; needs two numbers such as [128, 128]") from error


def open_tensors(folder: Path, files: ExitStack) -> dict[str, Any]:
    """Every tensor of a checkpoint's folder -> the open file that holds it.

    Where two files hold a tensor, it is that of the file that the index names.

    Raises:
        UntrustedError: a file is damaged, missing or outside of the folder, or the index does not fit the files.
    """
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        file = _open(folder, "model.safetensors", files)
        return _unpacked(dict.fromkeys(file.keys(), file))
    try:
        found = parse_json(read_text(index))
    except UntrustedError as error:
        raise UntrustedError(f"{index.name} {error}") from error
    weight_map = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(weight_map, dict) or any(type(name) is not str for name in weight_map.values()):
        raise UntrustedError(f"{index.name} has no weight_map from tensors to files")
    names = sorted(set(weight_map.values()))
    if outside := [name for name in names if Path(name).name != name]:
        raise UntrustedError(f"{index.name} names {outside[0]!r}, which is no file of this folder")
    opened = {name: _open(folder, name, files) for name in names}
    held = {name: set(file.keys()) for name, file in opened.items()}
    if lacking := [key for key, name in weight_map.items() if key not in held[name]]:
        raise UntrustedError(f"{index.name} maps {_some(lacking)} to {weight_map[lacking[0]]}, which does not hold it")
    if more := sorted(set().union(*held.values()) - weight_map.keys()):
        raise UntrustedError(f"{index.name} does not name {_some(more)}, which its files hold")
    return _unpacked({key: opened[name] for key, name in weight_map.items()})


class _Made(NamedTuple):
    """A tensor that is made of those in files; it answers as a file that holds it, and as its slice."""

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], Tensor]

    def get_slice(self, name: str) -> _Made:
        return self

    def get_shape(self) -> tuple[int, ...]:
        return self.shape

    def get_dtype(self) -> str:
        return self.dtype

    def get_tensor(self, name: str) -> Tensor:
        return self.read()


def _unpacked(tensors: dict[str, Any]) -> dict[str, Any]:
    """With 4-bit codes a byte each under NAME.weight, and one fp32 scale for each of their blocks."""
    for name in [name for name in tensors if name.endswith(".weight_packed")]:
        prefix, file = name.removesuffix("weight_packed"), tensors.pop(name)
        shape = file.get_slice(name).get_shape()
        if file.get_slice(name).get_dtype() != "U8" or len(shape) != 2 or f"{prefix}weight" in tensors:
            raise UntrustedError(f"{name} is no matrix of bytes, or stands beside {prefix}weight")
        tensors[f"{prefix}weight"] = _Made((shape[0], 2 * shape[1]), _FP4, partial(_nibbles, file, name))
        scale, whole = f"{prefix}weight_scale", tensors.pop(f"{prefix}weight_global_scale", None)
        if whole is not None and (blocks := tensors.get(scale)) is not None:
            size = tuple(blocks.get_slice(scale).get_shape())
            tensors[scale] = _Made(size, "F32", partial(_product, blocks, scale, whole, f"{prefix}weight_global_scale"))
    return tensors


def _nibbles(file: Any, name: str) -> Tensor:
    packed = file.get_tensor(name)
    return torch.stack([packed & 15, packed >> 4], -1).flatten(1)


def _product(blocks: Any, scale: str, whole: Any, name: str) -> Tensor:
    """The scales of blocks times the inverse of that of the tensor, which quantizes."""
    factor = whole.get_tensor(name).float()
    if factor.numel() != 1 or not 0 < float(factor) < torch.inf:
        raise UntrustedError(f"{name} holds {factor.numel()} numbers; needs one, positive and finite")
    product: Tensor = blocks.get_tensor(scale).float() * factor.reciprocal().reshape(())
    return product


def _open(folder: Path, name: str, files: ExitStack) -> Any:
    from safetensors import SafetensorError, safe_open

    path = folder / name
    regular_size(path)
    try:
        file = files.enter_context(safe_open(path, framework="pt"))
    except SafetensorError as error:
        raise UntrustedError(f"{name} is no safetensors file, or cut short ({error})") from error
    with path.open("rb") as stream:  # the library takes the last of two equal keys
        header = stream.read(int.from_bytes(stream.read(8), "little"))
    try:
        parse_json(header)
    except UntrustedError as error:
        raise UntrustedError(f"the header of {name} {error}") from error
    return file


def _places(model: nn.Module) -> dict[str, _Place]:
    """Parameters and buffers by their names in a checkpoint: PEFT adds prefixes and infixes."""
    places: dict[str, _Place] = {}
    for prefix, module in model.named_modules():
        for own in (*module._parameters, *(n for n in module._buffers if n not in module._non_persistent_buffers_set)):
            if getattr(module, own) is not None:
                full = f"{prefix}.{own}" if prefix else own
                places[full.removeprefix("base_model.model.").replace(".base_layer.", ".")] = _Place(full, module, own)
    return places


def _stored(tensors: Mapping[str, Any], places: Mapping[str, _Place], sizes: list[Granularity]) -> Iterator[_Stored]:
    """The weights that are codes, with their scales."""
    for key, file in tensors.items():
        if not is_codes(key, tensors):
            continue
        place = places.get(key)
        if place is None:
            raise UntrustedError(
                f"{key} is in FP8, and the model has no such weight: build the model of this config.json"
            )
        linear = place.module
        if place.own != "weight" or not isinstance(linear, nn.Linear):
            raise UntrustedError(f"{key} is in FP8, and a {type(linear).__name__} has it; codes are for nn.Linear")
        shape = tuple(file.get_slice(key).get_shape())
        if shape != tuple(linear.weight.shape):
            raise UntrustedError(f"{key} has shape {shape}; the model's has {tuple(linear.weight.shape)}")
        scale_inv, spec = scales_of(key, tensors, sizes)
        yield _Stored(place, key, store_scales(scale_inv, spec), spec)


def is_codes(key: str, tensors: Mapping[str, Any]) -> bool:
    """Whether a tensor of a checkpoint holds codes of E4M3 or E2M1.

    Raises:
        UntrustedError: it holds E5M2.
    """
    dtype = tensors[key].get_slice(key).get_dtype()
    if dtype == "F8_E5M2":
        raise UntrustedError(f"{key} is E5M2; weights are read as E4M3 only")
    return dtype in ("F8_E4M3", _FP4)


def is_scale(key: str, tensors: Mapping[str, Any]) -> bool:
    """Whether a tensor of a checkpoint is a scale: of the codes beside it, or of activations."""
    module, _, last = key.rpartition(".")
    weight = f"{module}.weight" if module else "weight"
    return last in _UNUSED or (last in _SCALES and weight in tensors and is_codes(weight, tensors))


def scales_of(key: str, tensors: Mapping[str, Any], sizes: list[Granularity]) -> tuple[Tensor, QuantizationSpec]:
    """The scales of codes, fp32 in the shape of their blocks, and the spec that they fit.

    Raises:
        UntrustedError: it has no scales, or they fit no block size of the config.
    """
    prefix = key.removesuffix("weight")
    scales = [name for name in _SCALES if prefix + name in tensors]
    if not scales:
        raise UntrustedError(f"{key} is in FP8, and has neither {_SCALES[0]} nor {_SCALES[1]} beside it")
    if len(scales) > 1:
        raise UntrustedError(f"{key} has both {_SCALES[0]} and {_SCALES[1]} beside it: nobody can know which holds")
    scale_key = prefix + scales[0]
    shape = tensors[key].get_slice(key).get_shape()
    scale_inv, size = _scales(scale_key, tensors[scale_key].get_tensor(scale_key), (shape[0], shape[1]), sizes)
    if tensors[key].get_slice(key).get_dtype() == _FP4:
        return scale_inv, QuantizationSpec(E2M1, size, "e8m0" if size == BLOCK_1X32 else "e4m3")
    powers: ScaleFormat = "e8m0" if size == BLOCK_1X32 and fit_bytes(scale_inv) else "pow2"
    return scale_inv, QuantizationSpec(E4M3, size, powers if powers_only(scale_inv) else "fp32")


def read_codes(key: str, tensors: Mapping[str, Any]) -> Tensor:
    """The codes of a tensor.

    Raises:
        UntrustedError: one of them is NaN. E4M3 has no infinity.
    """
    codes: Tensor = tensors[key].get_tensor(key)
    if bool(((codes.view(torch.uint8) & 0x7F) == 0x7F).any()):
        raise UntrustedError(f"{key} holds codes that are NaN: the checkpoint is damaged, or its training was")
    return codes


def _scales(key: str, found: Tensor, shape: tuple[int, int], sizes: list[Granularity]) -> tuple[Tensor, Granularity]:
    """fp32 scales in the shape of their blocks."""
    if found.dtype == torch.uint8:  # E8M0 by its bits
        found = found.view(torch.float8_e8m0fnu)
    if found.dtype not in (*FLOATS, torch.float8_e8m0fnu):
        raise UntrustedError(
            f"{key} has dtype {found.dtype}; needs float32, bfloat16, float16, or E8M0 (also as uint8)"
        )
    scale_inv = found.to(torch.float32)
    if scale_inv.dim() < 2:
        scale_inv = scale_inv.reshape(-1, 1)
    for size in sizes:
        if tuple(scale_inv.shape) == size.grid_shape(shape):
            break
    else:
        wanted = " or ".join(str(size.grid_shape(shape)) for size in sizes)
        raise UntrustedError(f"{key} has shape {tuple(found.shape)}; a weight {shape} needs {wanted} scales")
    if not bool(scale_inv.isfinite().all()) or bool((scale_inv < 0).any()):
        raise UntrustedError(f"{key} holds negative or non-finite scales: the checkpoint is damaged")
    return scale_inv, size


def _plain(tensors: Mapping[str, Any], places: Mapping[str, _Place], stored: set[str]) -> list[tuple[_Place, str]]:
    """The other tensors of the checkpoint with their places."""
    found, unknown = [], []
    for key, file in tensors.items():
        if key in stored or is_scale(key, tensors):
            continue
        if (place := places.get(key)) is None:
            unknown.append(key)
            continue
        shape, own = tuple(file.get_slice(key).get_shape()), tuple(getattr(place.module, place.own).shape)
        if shape != own:
            raise UntrustedError(f"{key} has shape {shape}; the model's has {own}")
        _check_plain(key, file.get_tensor(key), getattr(place.module, place.own), place)
        found.append((place, key))
    if unknown:
        raise UntrustedError(
            f"holds {_some(unknown)}, which the model does not have: build the model of this config.json"
        )
    return found


def _check_plain(key: str, values: Tensor, own: Tensor, place: _Place) -> None:
    """Refuses another kind of dtype, NaN, and infinities except in buffers, where a mask may have them."""
    kinds = [(one.is_complex(), one.is_floating_point(), one.dtype == torch.bool) for one in (values, own)]
    if kinds[0] != kinds[1]:
        raise UntrustedError(f"{key} has dtype {values.dtype}; the model's has {own.dtype}")
    cast = values.to(own.dtype)
    bad = cast.isnan() if place.own in place.module._buffers else ~cast.isfinite()
    if bool(bad.any()):
        raise UntrustedError(f"{key} holds {int(bad.sum()):,} numbers that are not finite in {own.dtype}")


def _check_whole(model: nn.Module, places: list[_Place]) -> None:
    """Raises unless each parameter gets numbers, itself or through a tied module; adapters need none."""
    given = {id(place.module._parameters.get(place.own)) for place in places}
    missing = [
        name
        for name, parameter in model.named_parameters()
        if id(parameter) not in given and not any(part.startswith("lora_") for part in name.split("."))
    ]
    if missing:
        raise UntrustedError(f"lacks {_some(missing)} of the model (where it is tied to another: model.tie_weights())")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _fill_buffers(model: nn.Module, given: set[int], device: torch.device | str | None) -> None:
    """Computes the buffers on meta that the checkpoint does not have, such as a table of frequencies.

    A class of Hugging Face's knows how: its `_init_weights` fills the buffers of a module that holds nothing else.

    Raises:
        UntrustedError: nobody knows how; no buffer is changed then.
    """
    made: list[tuple[nn.Module, dict[str, Tensor | None]]] = []
    owners = [module for module in model.modules() if callable(getattr(module, "_init_weights", None))]
    for prefix, module in model.named_modules():
        empty = {n: b for n, b in module._buffers.items() if b is not None and b.is_meta and id(b) not in given}
        if not empty or isinstance(module, Quantizer):
            continue
        made.append((module, dict(module._buffers)))
        for own, buffer in empty.items():
            module._buffers[own] = torch.full_like(buffer, _unset(buffer.dtype), device=device or "cpu")
        owner = next((one for one in reversed(owners) if any(below is module for below in one.modules())), None)
        if owner is not None and not module._parameters:
            owner._init_weights(module)  # type: ignore[operator]
        names = [f"{prefix}.{own}".lstrip(".") for own, buffer in empty.items() if _is_unset(module._buffers[own])]
        if names:
            for changed, before in made:
                changed._buffers.update(before)
            raise UntrustedError(
                f"lacks {_some(names)}: buffers of the model on the meta device, which nothing fills. Build the model "
                "outside of torch.device('meta'), or give these buffers numbers first"
            )


def _unset(dtype: torch.dtype) -> float | bool:
    """A value that no buffer is filled with on purpose."""
    if dtype == torch.bool:
        return False
    return torch.nan if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype).min


def _is_unset(buffer: Tensor | None) -> bool:
    if buffer is None or buffer.is_meta:
        return True
    if buffer.dtype == torch.bool:
        return not bool(buffer.any())
    value = _unset(buffer.dtype)
    return bool((buffer.isnan() if value != value else buffer == value).any())


def _put_in(
    model: nn.Module,
    folder: Path,
    recipe: Recipe,
    stored: list[_Stored],
    plain: list[tuple[_Place, str]],
    tensors: Mapping[str, Any],
    device: torch.device | str | None,
    weights: Loaded,
) -> LoadReport:
    def home(tensor: Tensor) -> torch.device:
        return torch.device(device or "cpu") if tensor.is_meta else tensor.device

    nbytes = bf16_bytes = 0
    layers = {one.place.full.rpartition(".")[0] for one in stored}
    convert(model, recipe, filter=lambda name, layer: name in layers)
    for place, key, scales, spec in stored:
        old = place.module._parameters["weight"]
        assert old is not None
        codes = tensors[key].get_tensor(key).to(home(old))
        weight = QuantizedWeight(codes.contiguous(), scales.to(codes.device), spec, old.dtype)
        if weights == "bf16":
            put_weight(place.full, old, weight.dequantize(), requires_grad=old.requires_grad)
        else:
            put_weight(place.full, old, weight, requires_grad=old.requires_grad and weights == "fp8")
            keep_in_state_dict(place.module, "weight")
        nbytes, bf16_bytes = nbytes + weight.nbytes, bf16_bytes + 2 * weight.numel()
    for place, key in plain:
        old = getattr(place.module, place.own)
        values = tensors[key].get_tensor(key).to(home(old), old.dtype)
        if not old.is_meta:
            with torch.no_grad():
                old.copy_(values)
        elif isinstance(old, nn.Parameter):
            put_weight(place.full, old, values, requires_grad=old.requires_grad)
        else:
            place.module._buffers[place.own] = values
    for module in model.modules():
        if isinstance(module, Quantizer) and any(buffer.is_meta for buffer in module.buffers()):
            module.to_empty(device=device or "cpu")  # empties its history, too
    names = {one.place.full: one.spec for one in stored} if weights != "bf16" else {}
    return LoadReport(folder, names, tuple(place.full for place, _ in plain), nbytes, bf16_bytes)
