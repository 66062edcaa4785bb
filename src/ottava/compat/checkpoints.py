"""Reads checkpoints of TransformerEngine and torchao without their code, as plain tensors under ottava's names.

    NAME, NAME_scale_inv    codes and their scales, as a model with FP8 weights saves and loads them
    NAME                    numbers
    NAME._extra_state       TransformerEngine's histories as they are; `compat`'s modules load them

TransformerEngine's quantized tensors (Float8Tensor, Float8BlockwiseQTensor, MXFP8Tensor) are read as their functions
for pickles take them, torchao's Float8Tensor and AffineQuantizedTensor by their attributes, and torchao's safetensors
by their names. In all of them a scale is the factor that dequantizes.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ottava.base.files import replacing_folder
from ottava.base.untrusted import UntrustedError, parse_json, read_text, regular_size
from ottava.interop.contents import flattened
from ottava.interop.safe_pickle import DamagedError, RefusedError, StandIn, StandInTensor, check_tensors, load_torch
from ottava.numerics.scaling import BLOCK_1X32, BLOCK_128X128, read_scales
from ottava.numerics.tensor import QuantizedTensor
from ottava.serving.export import export, write_tensors
from ottava.serving.source import Source, Weight
from ottava.weights.checkpoint import SCALE_SUFFIX, infer_spec
from ottava.weights.parameter import adopt_scales

_KINDS = Tensor | StandIn | io.BytesIO
_E4M3 = 7
"""TransformerEngine's number of the format (transformer_engine.h)."""
_STATE = "_extra_state"
_INNER = ("model", "state_dict", "module", "model_state_dict")  # where training checkpoints hold the state dict


class _Codes(NamedTuple):
    data: Tensor
    scale_inv: Tensor


def read_state(path: Path) -> dict[str, Tensor]:
    """The tensors of a file of torch.save or safetensors; quantized ones as codes and scales.

    Raises:
        UntrustedError: the file is damaged, names code that would run, or holds a tensor in a layout that is not read.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "model.pt"
        ...     torch.save({"model": {"up.weight": torch.ones(2, 2)}}, path)
        ...     list(read_state(path))
        ['up.weight']
    """
    size = regular_size(path)
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            entries: Mapping[str, Any] = dict(_renamed(load_file(path)))
        else:
            tree = load_torch(path)
            check_tensors(tree, size)
            parts = [tree.get(key) for key in _INNER] if isinstance(tree, Mapping) else []
            own = next((part for part in parts if isinstance(part, Mapping)), tree)
            entries = {name: one for name, one in flattened(own) if isinstance(one, _KINDS)}
    except (RefusedError, DamagedError) as error:
        raise UntrustedError(f"{path}: {error}") from error
    except Exception as error:
        if isinstance(error, UntrustedError) or getattr(error, "filename", None):  # safetensors names no file
            raise
        raise UntrustedError(f"{path}: is damaged, or no checkpoint ({str(error).splitlines()[0]})") from error
    state: dict[str, Tensor] = {}
    for name, value in entries.items():
        try:
            state |= _plain(name, value)
        except (UntrustedError, ValueError) as error:
            raise UntrustedError(f"{path}: {name}: {error}") from error
    if not state:
        raise UntrustedError(f"{path}: holds no tensor")
    return state


def _renamed(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Any]]:
    """torchao's safetensors have NAME._weight_qdata and NAME._weight_scale for NAME.weight."""
    for name, value in tensors.items():
        prefix, mark, last = name.rpartition("._")
        own, _, kind = last.rpartition("_")
        if mark and kind == "qdata" and (scale := tensors.get(f"{prefix}._{own}_scale")) is not None:
            yield f"{prefix}.{own}", _Codes(value, scale)
        elif not (mark and kind == "scale" and f"{prefix}._{own}_qdata" in tensors):
            yield name, value


def _plain(name: str, value: Any) -> dict[str, Tensor]:
    if isinstance(value, io.BytesIO):
        return {name: torch.frombuffer(bytearray(value.getvalue() or b"\0"), dtype=torch.uint8)}
    if isinstance(value, StandInTensor) or type(value).__module__.startswith("torchao."):  # torchao is imported
        value = _of_torchao(value)
    elif isinstance(value, StandIn):
        value = _of_transformer_engine(value)
    if isinstance(value, Tensor):
        return {name: value}
    codes, scale_inv = value
    scale_inv = scale_inv if scale_inv.dtype == torch.uint8 else scale_inv.float()  # bytes are those of E8M0
    if codes.dtype not in (torch.float8_e4m3fn, torch.uint8) or codes.dim() != 2:
        raise UntrustedError(f"got codes {codes.dtype} {tuple(codes.shape)}; read are matrices of E4M3")
    codes = codes.view(torch.float8_e4m3fn).contiguous()
    scales = scale_inv.reshape(-1, 1) if scale_inv.dim() < 2 else scale_inv
    infer_spec(codes, scales)  # refuses scales that fit no codes
    return {name: codes, name + SCALE_SUFFIX: scales.contiguous()}


def _of_torchao(tensor: Any) -> _Codes:
    held = vars(tensor)
    if "original_weight_tensor" in held:  # LinearActivationQuantizedTensor: a cast of activations in front of it
        return _of_torchao(held["original_weight_tensor"])
    if "qdata" in held:
        return _Codes(held["qdata"], held["scale"])
    if "tensor_impl" in held and "float8_data" in (inner := vars(held["tensor_impl"])):
        data = inner["float8_data"]
        return _Codes(data.t() if inner.get("transposed") else data, inner["scale"])
    raise UntrustedError(f"{type(tensor).__name__} is no FP8 tensor; it holds {', '.join(held) or 'nothing'}")


def _of_transformer_engine(tensor: StandIn) -> Any:
    kind, given = type(tensor).qualified_name, tensor.args
    if "float8_blockwise" in kind and len(given) >= 9:
        shape, data, scale_inv, _, _, fp8, _, _, both = given[:9]
        if not both:
            raise UntrustedError("has blocks of 1 x 128, as activations have; weights need is_2D_scaled")
        scale_inv = _cut(scale_inv, BLOCK_128X128.grid_shape(tuple(shape)))
    elif "mxfp8" in kind and len(given) >= 7:
        data, scale_inv, _, _, fp8, _, shape = given[:7]
        if len(given) > 8 and given[8]:
            raise UntrustedError("has its scales in the order of a GEMM (with_gemm_swizzled_scales); save it without")
        scale_inv = _cut(scale_inv, BLOCK_1X32.grid_shape(tuple(shape)))
    elif "float8_tensor" in kind and len(given) >= 5:
        data, fp8, scale_inv, _, shape = given[:5]
        if data is None and len(given) > 5 and given[5] is not None:
            data = given[5].t()
    else:
        raise UntrustedError(f"{kind} is no quantized tensor that is read here")
    if data is None or scale_inv is None:
        raise UntrustedError("holds only the codes of its transpose, or no scales")
    if _number(fp8) != _E4M3:
        raise UntrustedError(f"has format {_number(fp8)} of TransformerEngine's; weights are read as E4M3 ({_E4M3})")
    return _Codes(data.view(torch.uint8), scale_inv)


def _cut(scales: Tensor | None, grid: tuple[int, int]) -> Tensor | None:
    """Without the padding of TransformerEngine's scales."""
    return None if scales is None else scales[: grid[0], : grid[1]]


def _number(value: Any) -> Any:
    """Of an enum, or of its stand-in."""
    if isinstance(value, StandIn):
        numbers = [one for one in (*value.args, value.state) if isinstance(one, int)]
        return numbers[0] if numbers else None
    return value


def import_checkpoint(path: Path, folder: Path, *, config: Path | None = None) -> dict[str, Any]:
    """Writes the tensors of a checkpoint file to a new folder.

    Args:
        path: a file of torch.save or safetensors, of TransformerEngine, torchao or plain torch.
        config: config.json of Hugging Face's for its names; the folder is then a checkpoint that `ottava train --init`,
            export and parity take, with the codes of the file. None: model.safetensors alone, for load_state_dict.
    Returns:
        tensors, codes (weights in FP8), bytes, and the codes that no layout holds as they are.
    Raises:
        UntrustedError: the file cannot be read.  ExportError: the folder is not empty.
    """
    state = read_state(path)
    coded = [name for name in state if name + SCALE_SUFFIX in state]
    facts: dict[str, Any] = {"tensors": len(state) - 2 * len(coded), "codes": len(coded), "changed": []}
    if config is None:
        if folder.exists() and any(folder.iterdir()):
            raise UntrustedError(f"{folder} exists and is not empty; give a new folder")
        with replacing_folder(folder) as scratch:
            parts = ({name: value.contiguous()} for name, value in state.items())
            return facts | {"bytes": write_tensors(scratch, parts, 5_000_000_000)}
    tree = parse_json(read_text(config))
    if not isinstance(tree, dict):
        raise UntrustedError(f"{config} is no object")
    tree.pop("quantization_config", None)
    own = [name for name in state if not name.endswith((_STATE, SCALE_SUFFIX))]
    source = Source(tuple(_weight(name, state) for name in own), tree)
    report = export(source, folder, layout=None if coded else "bf16", recast=True)
    return facts | {"bytes": report.nbytes, "changed": report.changed, "layout": report.layout}


def _weight(name: str, state: Mapping[str, Tensor]) -> Weight:
    scales = state.get(name + SCALE_SUFFIX)
    if scales is None:
        linear = name.endswith("proj.weight")
        return Weight(name, state[name], linear, "the file has it in high precision" if linear else "")
    spec = infer_spec(state[name], scales)
    cast = QuantizedTensor(state[name], read_scales(adopt_scales(scales, spec)), spec, torch.bfloat16)
    return Weight(name, cast.dequantize(torch.float32), True, "", cast)
