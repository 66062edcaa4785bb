"""Measures the tensor files of TransformerEngine's DumpTensors.

    tensor_dumps/rank_0/decoder_layers_0_mlp_fc1_activation_iter_000100.pt    {"high_precision": ..., "quantized": ...}

Such a file is a pickle that builds TransformerEngine's tensor classes. `safe_pickle` runs no code of it; the importer
takes codes and scales from the arguments of those classes. If a file has only the high-precision tensor, the importer
simulates the cast of a recipe; if it has only codes, their error is unknown.
Source: TransformerEngine debug/features/dump_tensors.py; __reduce_ex__ of its tensor classes; transformer_engine.h.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ottava.base.text import progress
from ottava.base.untrusted import regular_size
from ottava.interop.importers.collected import Collected, spec_of, whole
from ottava.interop.safe_pickle import StandIn, check_tensors, load_torch
from ottava.interop.te_config import TENSORS
from ottava.measure.layer_names import KINDS
from ottava.measure.walk import measure
from ottava.numerics.formats import E4M3, E5M2, E8M0, Format
from ottava.numerics.rounding import decode
from ottava.numerics.scaling import BLOCK_1X32, BLOCK_1X128, BLOCK_128X128, Granularity
from ottava.numerics.tensor import QuantizationSpec, QuantizedTensor
from ottava.ops.quantize import quantize
from ottava.record.schema import cast_key

FILE = re.compile(rf"(?P<layer>.+)_(?P<tensor>{'|'.join(TENSORS)})_iter_(?P<step>\d+)\.pt")
_FORMATS = MappingProxyType({7: E4M3, 8: E5M2})  # DType in transformer_engine.h
SIMULATED = "tensorwise"
"""Recipe to simulate for a tensor that was dumped in high precision only."""
_IMPLAUSIBLE_DB = 3.0
Decoded = tuple[str, QuantizedTensor]
"""A quantized tensor of TransformerEngine behind the recipe with such casts."""


class UnreadableError(ValueError):
    """A dump has nothing to measure; the message says why."""


def read(paths: list[Path], collected: Collected) -> None:
    """Measures every dump; notes the reason for a dump that it cannot measure."""
    spellings = {re.sub(r'[/\\:*?"<>| .]', "_", name): name for name in (*collected.spellings, *collected.layers)}
    for path in progress(paths, "measuring dumps"):
        match = FILE.fullmatch(path.name)
        assert match is not None
        layer = spellings.get(match["layer"]) or restored(match["layer"])
        rank = whole(folder[1]) if (folder := re.search(r"rank_(\d+)", path.parent.name)) else 0
        tensor = TENSORS[match["tensor"]]
        try:
            x, casts = _casts(path, tensor, collected.recipe)
            tallies = [measure(x, x_q) for *_, x_q in casts]
        except Exception as error:  # stand-ins may have arguments of any kind
            collected.note(f"{path.name}: {(str(error).splitlines() or [type(error).__name__])[0]}")
            continue
        for (direction, recipe, source, x_q), tally in zip(casts, tallies, strict=True):
            key = cast_key(layer, tensor, direction, recipe, x_q.spec, f"import:{source}")
            collected.tally(whole(match["step"]), rank, key, tally)
            if tally.see > tally.sxx * 10 ** (-_IMPLAUSIBLE_DB / 10) and tally.n_underflow < tally.n_nonzero / 2:
                collected.note(
                    f"{path.name}: the codes hardly resemble the tensor; their scales may have another layout"
                )


def restored(layer: str) -> str:
    """A layer's name with dots in place of a dump's underscores, as far as its words are known.

    Example:
        >>> restored("decoder_layers_0_self_attention_layernorm_qkv")
        'decoder.layers.0.self_attention.layernorm_qkv'
    """
    head, *rest = re.split(r"_(\d+)_", layer)
    if not rest:
        return layer
    words = {word.replace(".", "_"): word for words in KINDS.values() for word in words.split()}
    for end in sorted(words, key=len, reverse=True):
        if rest[-1] == end or rest[-1].endswith(f"_{end}"):
            rest[-1] = f"{rest[-1].removesuffix(end).removesuffix('_')}.{words[end]}".removeprefix(".")
            break
    return ".".join([head.replace("_", "."), *rest])


def _casts(path: Path, tensor: str, recipe: str | None) -> tuple[Tensor, list[tuple[str, str, str, QuantizedTensor]]]:
    content = load_torch(path)
    if not isinstance(content, dict):
        raise UnreadableError(f"got {type(content).__name__}; needs the dict of DumpTensors")
    x, quantized = content.get("high_precision"), content.get("quantized")
    check_tensors([x, quantized], regular_size(path))
    if not isinstance(x, Tensor):
        raise UnreadableError("has no high-precision tensor, so the error of the codes is unknown")
    x = x.detach().reshape(-1, x.shape[-1]) if x.dim() else x.detach().reshape(1, 1)
    if isinstance(quantized, StandIn):
        casts, x_q = _decoded(quantized, x)
        return x, [("row", casts, "te_dump", x_q)]
    name = recipe or SIMULATED
    spec = spec_of(name, tensor)
    if spec is None:
        raise UnreadableError(f"has no codes, and recipe {name!r} casts no {tensor}")
    return x, [("row", name, "te_dump, simulated", quantize(x, spec))]


def _decoded(tensor: StandIn, x: Tensor) -> Decoded:
    for maker, take in _MAKERS.items():
        if maker in tensor.qualified_name:
            return take(tensor.args, x)
    name = tensor.qualified_name.rpartition(".")[2]
    raise UnreadableError(
        f"its codes come from {name}, which is unknown; known: Float8, MXFP8 and Float8Blockwise tensors"
    )


def _format(value: Any) -> Format:
    # a Python enum since TransformerEngine 2.17; before, a C++ enum whose state is its number
    number = value if not isinstance(value, StandIn) else value.args[0] if value.args else value.state
    if number not in _FORMATS:
        raise UnreadableError(f"its codes have TransformerEngine's DType {number!r}; known: 7 (E4M3), 8 (E5M2)")
    return _FORMATS[number]


def _made(
    data: Any, scale_inv: Tensor, fmt: Format, granularity: Granularity, x: Tensor, **how: Any
) -> QuantizedTensor:
    if not isinstance(data, Tensor):
        raise UnreadableError("has only the codes of the transpose")
    codes = data.contiguous().view(torch.uint8).reshape(x.shape).view(fmt.storage_dtype)
    grid = granularity.grid_shape((x.shape[0], x.shape[1]))
    scale_inv = scale_inv[: grid[0], : grid[1]].to(torch.float32).contiguous()
    if tuple(scale_inv.shape) != grid:
        raise UnreadableError(f"has scales {tuple(scale_inv.shape)}; needs {grid} for blocks of {granularity}")
    return QuantizedTensor(codes, scale_inv, QuantizationSpec(fmt, granularity, **how), x.dtype)


def _float8(args: tuple[Any, ...], x: Tensor) -> Decoded:
    data, fp8_dtype, scale_inv, *_ = args
    return "tensorwise", _made(data, scale_inv.reshape(1, 1), _format(fp8_dtype), Granularity(None, None), x)


def _mxfp8(args: tuple[Any, ...], x: Tensor) -> Decoded:
    data, scale_inv, _, _, fp8_dtype, *_ = args
    if len(args) > 8 and args[8]:
        raise UnreadableError("has its scales in the order of the GEMM; needs the order of the tensor")
    exponents = decode(scale_inv.view(E8M0.storage_dtype), E8M0)
    return "mxfp8", _made(data, exponents, _format(fp8_dtype), BLOCK_1X32, x, scale_format="e8m0")


def _blockwise(args: tuple[Any, ...], x: Tensor) -> Decoded:
    _, data, scale_inv, _, _, fp8_dtype, _, _, square, *_ = args
    granularity = BLOCK_128X128 if square else BLOCK_1X128
    if not square:
        scale_inv = scale_inv.t()  # stored (columns / 128, rows)
    return "blockwise", _made(data, scale_inv, _format(fp8_dtype), granularity, x)


_MAKERS: MappingProxyType[str, Callable[[tuple[Any, ...], Tensor], Decoded]] = MappingProxyType(
    {"make_float8_tensor": _float8, "make_mxfp8_tensor": _mxfp8, "make_float8_blockwise": _blockwise}
    | {".Float8Tensor._make": _float8, ".MXFP8Tensor._make": _mxfp8, ".Float8BlockwiseQTensor._make": _blockwise}
)
"""Function that rebuilds a tensor -> its reader. TransformerEngine 2.15 has class methods instead of functions."""
