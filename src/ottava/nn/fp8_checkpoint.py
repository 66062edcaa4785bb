"""`load_fp8` puts the codes of a published FP8 checkpoint into a model: frozen, to train on, or decoded.

It reads the folders that `weights.layouts` knows, and checks everything before it changes anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from ottava.base.errors import need, need_known
from ottava.base.text import listed
from ottava.base.untrusted import UntrustedError
from ottava.engine.quantizer import Quantizer
from ottava.nn.convert import convert, put_weight
from ottava.numerics.scaling import Granularity
from ottava.numerics.tensor import QuantizationSpec
from ottava.recipe import Recipe, get_recipe
from ottava.weights.checkpoint import keep_in_state_dict
from ottava.weights.layouts import (
    is_codes,
    is_scale,
    open_tensors,
    read_codes,
    read_config,
    read_quantization,
    scales_of,
)
from ottava.weights.operands import refuse_weight
from ottava.weights.parameter import QuantizedWeight, store_scales

Loaded = Literal["frozen", "fp8", "bf16"]
"""What `load_fp8` makes of FP8 weights."""
_SHOWN = 3


@dataclass(frozen=True)
class LoadReport:
    """The result of `load_fp8`: the tensors that it has put into a model.

    Example: see `load_fp8`.
    """

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

    Example:
        >>> import tempfile, ottava
        >>> from ottava.serving.source import Source, Weight
        >>> source = Source((Weight("up.weight", torch.randn(128, 256).bfloat16(), linear=True),), {})
        >>> model = nn.ModuleDict({"up": nn.Linear(256, 128, bias=False)}).bfloat16()
        >>> with tempfile.TemporaryDirectory() as place:
        ...     report = ottava.export(source, f"{place}/out", layout="fp8-block")
        ...     loaded = load_fp8(model, f"{place}/out")
        >>> loaded.nbytes < 0.51 * loaded.bf16_bytes, model["up"].weight.requires_grad
        (True, False)
    """
    need("load_fp8", model, nn.Module)
    need_known("load_fp8", "weights", weights, get_args(Loaded))
    if not isinstance(folder, str):
        need("load_fp8", folder, PathLike, "a path: the folder of a published checkpoint")
    folder, recipe = Path(folder), get_recipe(recipe)
    try:
        with ExitStack() as files:
            if not (said := read_config(folder).get("quantization_config")):
                raise UntrustedError(
                    "config.json has no quantization_config: its weights are not quantized; use from_pretrained"
                )
            sizes = read_quantization(said).blocks
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


def _places(model: nn.Module) -> dict[str, _Place]:
    """Parameters and buffers by their names in a checkpoint: PEFT adds prefixes and infixes."""
    places: dict[str, _Place] = {}
    for prefix, module in model.named_modules():
        for own in (*module._parameters, *(n for n in module._buffers if n not in module._non_persistent_buffers_set)):
            if getattr(module, own) is not None:
                full = f"{prefix}.{own}" if prefix else own
                places[full.removeprefix("base_model.model.").replace(".base_layer.", ".")] = _Place(full, module, own)
    return places


def _stored(
    tensors: Mapping[str, Any], places: Mapping[str, _Place], sizes: Sequence[Granularity]
) -> Iterator[_Stored]:
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
            f"holds {listed(unknown, _SHOWN)}, which the model does not have: build the model of this config.json"
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
        raise UntrustedError(
            f"lacks {listed(missing, _SHOWN)} of the model (where it is tied to another: model.tie_weights())"
        )


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
                f"lacks {listed(names, _SHOWN)}: buffers of the model on the meta device, which nothing fills. Build "
                "the model outside of torch.device('meta'), or give these buffers numbers first"
            )


def _unset(dtype: torch.dtype) -> float | bool:
    """A value that no buffer is filled with on purpose."""
    if dtype == torch.bool:
        return False
    return torch.nan if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype).min


def _is_unset(buffer: Tensor | None) -> bool:
    if buffer is None or buffer.is_meta:
        return True
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
