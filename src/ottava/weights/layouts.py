"""The layouts of FP8 and FP4 checkpoints, to write and to read. A new layout is an entry of `LAYOUTS`.

An entry says all that there is to know: the cast of weights, names and dtypes of their scales, the method of its
quantization_config, and the cast of activations. The config is made of it, and `read_quantization` reads every config
that one of these methods may have. It refuses what it does not know.

Every stored scale is the factor that dequantizes, under whatever name; only compressed-tensors' one scale of an FP4
tensor quantizes. Sources: compressed-tensors 0.20 (quant_config.py, quant_args.py), transformers 5.23
(FineGrainedFP8Config), ModelOpt's hf_quant_config.json as vLLM 0.33.0 reads it (modelopt.py, KNvfp4Static).
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ottava.base.errors import need_known, unknown_name
from ottava.base.text import listed
from ottava.base.untrusted import UntrustedError, misfit, opened, parse_json, read_index, read_text, regular_size
from ottava.numerics.formats import E2M1, E4M3
from ottava.numerics.rounding import code_values, round_to_format
from ottava.numerics.scaling import (
    BLOCK_1X16,
    BLOCK_1X32,
    BLOCK_1X128,
    BLOCK_16X16,
    BLOCK_128X128,
    PER_ROW,
    PER_TENSOR,
    Granularity,
    ScaleFormat,
    amax,
)
from ottava.numerics.tensor import QuantizationSpec, QuantizedTensor
from ottava.weights.parameter import FLOATS, fit_bytes, powers_only

ScaleDtype = Literal["fp32", "e8m0", "uint8", "e4m3"]
SCALE_KEYS = ("weight_scale_inv", "weight_scale")
"""Names of a weight's scale, beside NAME.weight."""
INPUT_KEYS = ("input_scale", "activation_scale")
"""Names of the scale of a linear's input."""
_OTHER_SCALES = ("k_scale", "v_scale", "output_scale")
REGEX = "re:"
"""In front of a name in a config: it is a regular expression."""
IGNORE = MappingProxyType(
    {
        "compressed-tensors": "ignore",
        "fp8": "modules_to_not_convert",
        "mxfp8": "modules_to_not_convert",
        "modelopt": "ignore",
    }
)
"""quant_method -> where its config lists the linears that stay in BF16. These methods are written and read."""
MODELOPT = "hf_quant_config.json"
"""ModelOpt's own file beside config.json."""


@dataclass(frozen=True)
class Layout:
    """How a checkpoint stores weights and their scales, and what its config.json says."""

    name: str
    spec: QuantizationSpec | None
    """The cast of the weights; None: BF16."""
    method: str = "compressed-tensors"
    """quant_method of config.json."""
    inputs: Granularity | None = None
    """The cast of activations; None: they stay in high precision."""
    scale_key: str = "weight_scale"
    """Beside NAME.weight stands NAME.scale_key."""
    scale_dtype: ScaleDtype = "fp32"
    """e8m0 and uint8 hold the exponent of a power of two; e4m3 stands beside one fp32 scale for the tensor."""
    kind: str = "float-quantized"
    """compressed-tensors' name of the format."""
    static: bool = False
    """Whether engines need a scale of the activations in the checkpoint (NAME.input_scale)."""
    algorithm: str = ""
    """ModelOpt's quant_algo."""

    @property
    def packed(self) -> bool:
        """Whether codes of 4 bits lie in pairs in a byte, the first one in the low bits."""
        return self.spec is not None and self.spec.format.bits == 4

    @property
    def shares_scale(self) -> bool:
        """Whether q, k, v and gate, up share one scale, because engines fuse them into one weight."""
        return self.spec is not None and (self.spec.granularity == PER_TENSOR or self.spec.scale_format == "e4m3")

    def holds(self, spec: QuantizationSpec) -> bool:
        """Whether the layout stores the codes and scales of such a cast as they are."""
        own = self.spec
        if own is None or spec.transform is not None or spec.format != own.format:
            return False
        if own.scale_format == "e4m3":  # rows of a tile repeat its scale
            return spec.scale_format == "e4m3" and spec.granularity in (BLOCK_1X16, BLOCK_16X16)
        powers = self.scale_dtype == "fp32" or spec.scale_format in ("pow2", "e8m0", "e8m0_floor")
        return spec.granularity == own.granularity and powers

    def common(self, casts: Sequence[QuantizedTensor]) -> Tensor | None:
        """The scale of the tensor that casts have in common, as it is stored; None: they have none in common."""
        if self.scale_dtype == "e4m3":
            return tensor_scale(casts)
        scales = {float(cast.scale_inv) for cast in casts}
        return torch.tensor(scales.pop(), dtype=torch.float32) if len(scales) == 1 else None

    def tensors(self, cast: QuantizedTensor, common: Tensor | None = None) -> dict[str, Tensor]:
        """The tensors of a weight by their own names.

        Args:
            common: of the linears that engines join with it; None: its own.
        Raises:
            ValueError: scales that the layout cannot store.
        """
        if not self.packed:
            return {"weight": cast.data, self.scale_key: self.stored_scale(cast.scale_inv.cpu()).clone()}
        codes, modelopt = cast.data.cpu(), self.method == "modelopt"
        made = {"weight" if modelopt else "weight_packed": codes[:, ::2] | codes[:, 1::2] << 4}
        if self.scale_dtype != "e4m3":
            return made | {self.scale_key: self.stored_scale(cast.scale_inv.cpu()).clone()}
        encode = tensor_scale([cast]) if common is None else common
        if encode is None:
            raise ValueError(f"layout {self.name!r}: the scales are no E4M3 numbers times one number of the tensor")
        blocks = torch.where(_used(cast), cast.scale_inv.cpu() / encode.reciprocal(), 0.0)
        rows = round_to_format(blocks, E4M3).repeat_interleave(cast.spec.granularity.rows or 1, 0)[: codes.shape[0]]
        made[self.scale_key] = rows.to(torch.float8_e4m3fn)
        return made | ({_DECODES: encode.reciprocal()} if modelopt else {_ENCODES: encode.reshape(1).clone()})

    def fits(self, shape: tuple[int, int]) -> bool:
        """Whether a weight (N, K) has whole blocks only: engines read others wrong, some silently."""
        size = Granularity(None, None) if self.spec is None else self.spec.granularity
        return all(
            extent in (None, 1) or n % extent == 0 for n, extent in zip(shape, (size.rows, size.cols), strict=True)
        )

    def stored_scale(self, scale_inv: Tensor) -> Tensor:
        """fp32 scales (grid) in the dtype and the shape of the checkpoint.

        Raises:
            ValueError: a scale that is no power of two, where the layout holds exponents.
        """
        if self.spec is not None and self.spec.granularity == PER_TENSOR:
            scale_inv = scale_inv.reshape(1)
        if self.scale_dtype == "fp32":
            return scale_inv.to(torch.float32).contiguous()
        stored = scale_inv.to(torch.float8_e8m0fnu)
        if not torch.equal(stored.float(), scale_inv.float()):
            raise ValueError(f"layout {self.name!r} holds powers of two; got scales that are none")
        return (stored if self.scale_dtype == "e8m0" else stored.view(torch.uint8)).contiguous()

    def config(self, *, ignored: Sequence[str] = (), static: bool = False, kv_cache: bool = False) -> dict[str, Any]:
        """The quantization_config of config.json.

        Args:
            ignored: linear modules that stay in BF16, by their names in the checkpoint.
            static: whether the checkpoint holds scales of activations.
            kv_cache: whether it holds scales of keys and values.

        Example:
            >>> LAYOUTS["fp8-block"].config(ignored=["lm_head"])["weight_block_size"]
            [128, 128]
        """
        assert self.spec is not None
        size, ignore = self.spec.granularity, {IGNORE[self.method]: list(ignored)}
        if self.method == "modelopt":
            cache = {"dynamic": False, "num_bits": 8, "type": "float"} if kv_cache else None
            own = {"quant_method": "modelopt", "quant_algo": self.algorithm, "kv_cache_scheme": cache}
            return own | ignore | {"producer": {"name": "ottava"}}
        if self.method != "compressed-tensors":
            dynamic = {"quant_method": self.method, "activation_scheme": "dynamic"}
            blocks = {"weight_block_size": [size.rows, size.cols]}
            return dynamic | blocks | ({} if self.scale_dtype == "fp32" else {"scale_fmt": "ue8m0"}) | ignore
        inputs = None if self.inputs is None else self._arguments(self.inputs, dynamic=not static, inputs=True)
        cache = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
        return {
            "quant_method": "compressed-tensors",
            "format": self.kind,
            "quantization_status": "compressed",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": self._arguments(size, dynamic=False),
                    "input_activations": inputs,
                    "output_activations": None,
                }
            },
            **ignore,
            "kv_cache_scheme": cache if kv_cache else None,
            "global_compression_ratio": None,
        }

    def _arguments(self, size: Granularity, *, dynamic: bool, inputs: bool = False) -> dict[str, Any]:
        """compressed-tensors' words for a cast."""
        assert self.spec is not None
        own = {"num_bits": self.spec.format.bits, "type": "float", "symmetric": True, "dynamic": dynamic}
        for strategy, known in (_INPUTS if inputs else _WEIGHTS).items():
            if size == known:
                return own | {"strategy": strategy}
        if size.rows != 1:
            return own | {"strategy": "block", "block_structure": [size.rows, size.cols]}
        numbers = _SCALE_WORDS.get(self.spec.scale_format)
        group = {"strategy": "tensor_group" if self.spec.scale_format == "e4m3" else "group", "group_size": size.cols}
        return own | group | ({} if numbers is None else {"scale_dtype": numbers})

    def beside(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Other files that say the same: name -> content."""
        if self.method != "modelopt":
            return {}
        about = {"quant_algo": self.algorithm, "kv_cache_quant_algo": "FP8" if config["kv_cache_scheme"] else None}
        about |= {"exclude_modules": config[IGNORE["modelopt"]]} | ({"group_size": 16} if self.packed else {})
        return {MODELOPT: {"producer": {"name": "ottava"}, "quantization": about}}


def tensor_scale(casts: Sequence[QuantizedTensor]) -> Tensor | None:
    """fp32 (): 1 / it times E4M3 numbers are the scales of all these casts; None: there is no such number.

    A cast keeps the products only. The largest one is an E4M3 number times the tensor's scale, so one of the 126
    numbers gives it. Blocks of zeros have no scale.

    Example:
        >>> from ottava.ops.quantize import quantize
        >>> float(tensor_scale([quantize(torch.eye(4, 32), QuantizationSpec(E2M1, BLOCK_1X16, "e4m3"))]))
        2688.0
    """
    products = torch.cat([cast.scale_inv.cpu()[_used(cast)] for cast in casts]).unique()
    if not products.numel():
        return torch.ones((), dtype=torch.float32)
    for block in code_values(E4M3)[1:127].flip(0):  # 448 and down
        near = block / products[-1]
        for encode in (near, near.nextafter(0 * near), near.nextafter(near.new_tensor(torch.inf))):
            tensor = encode.reciprocal()
            if torch.equal(round_to_format(products / tensor, E4M3) * tensor, products):
                return torch.as_tensor(encode)
    return None


def _used(cast: QuantizedTensor) -> Tensor:
    """The blocks that hold a number beside 0."""
    return amax((cast.data.cpu() & 7).float(), cast.spec.granularity) > 0


_WEIGHTS = MappingProxyType({"tensor": PER_TENSOR, "channel": PER_ROW})
_INPUTS = MappingProxyType({"tensor": PER_TENSOR, "token": PER_ROW})
"""Strategies of compressed-tensors without a size."""
_SIZED = ("block", "group", "tensor_group")
_SCALE_WORDS = MappingProxyType({"e8m0": "torch.uint8", "e4m3": "torch.float8_e4m3fn"})
_ALGORITHMS: Mapping[str, tuple[int, Granularity, Granularity | None]] = MappingProxyType(
    {
        "FP8": (8, PER_TENSOR, PER_TENSOR),
        "FP8_PER_CHANNEL_PER_TOKEN": (8, PER_ROW, PER_ROW),
        "W4A16_NVFP4": (4, BLOCK_1X16, None),
    }
)
"""quant_algo of ModelOpt -> the bits and blocks of weights, and the blocks of activations."""
_ENCODES, _DECODES = "weight_global_scale", "weight_scale_2"
"""Names of the one scale of an FP4 tensor: compressed-tensors', which quantizes, and ModelOpt's."""
_BLOCKS = QuantizationSpec(E4M3, BLOCK_128X128)
_POWERS = QuantizationSpec(E4M3, BLOCK_128X128, "pow2")
_MX = QuantizationSpec(E4M3, BLOCK_1X32, "e8m0")
_MX4 = QuantizationSpec(E2M1, BLOCK_1X32, "e8m0")
_NV4 = QuantizationSpec(E2M1, BLOCK_1X16, "e4m3")

_ENTRIES = (
    Layout("bf16", None),
    Layout("compressed-tensors-block", _BLOCKS, inputs=BLOCK_1X128),
    Layout("compressed-tensors-channel", QuantizationSpec(E4M3, PER_ROW), inputs=PER_ROW),
    Layout("compressed-tensors-tensor", QuantizationSpec(E4M3), inputs=PER_TENSOR),
    Layout("compressed-tensors-mxfp8", _MX, inputs=BLOCK_1X32, scale_dtype="uint8", kind="mxfp8-quantized"),
    Layout("compressed-tensors-mxfp4", _MX4, inputs=BLOCK_1X32, scale_dtype="uint8", kind="mxfp4-pack-quantized"),
    Layout("compressed-tensors-nvfp4", _NV4, scale_dtype="e4m3", kind="nvfp4-pack-quantized"),
    Layout("fp8-block", _BLOCKS, "fp8", BLOCK_1X128, "weight_scale_inv"),
    Layout("fp8-block-ue8m0", _POWERS, "fp8", BLOCK_1X128, "weight_scale_inv", "e8m0"),
    Layout("mxfp8", _MX, "mxfp8", BLOCK_1X32, "weight_scale_inv", "uint8"),
    Layout("modelopt", QuantizationSpec(E4M3), "modelopt", PER_TENSOR, static=True, algorithm="FP8"),
    Layout("modelopt-nvfp4", _NV4, "modelopt", scale_dtype="e4m3", algorithm="W4A16_NVFP4"),
)

LAYOUTS: Mapping[str, Layout] = MappingProxyType({layout.name: layout for layout in _ENTRIES})
DEFAULT = "compressed-tensors-block"
"""The one layout that transformers, vLLM and SGLang read under the same names."""


# --- reading: config.json --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class InputCast:
    """The cast of activations in front of a linear."""

    granularity: Granularity
    powers: bool
    """Whether scales are powers of two."""
    static: bool
    """Whether the scale is a number of the checkpoint, or of a history."""
    scale_inv: float | None = None
    """That number."""
    rounded: bool = True
    """Whether a fused activation is rounded to BF16 before its cast."""

    def __str__(self) -> str:
        known = "" if self.scale_inv is None else f" {self.scale_inv:.6g}"
        words = ["powers of two" if self.powers else "fp32", f"static{known}" if self.static else "dynamic"]
        return f"[{', '.join([str(self.granularity), *words, *([] if self.rounded else ['not rounded to BF16'])])}]"


@dataclass(frozen=True)
class Group:
    """The linears of a checkpoint that are quantized in one way."""

    targets: tuple[str, ...]
    """Names, "re:" and a regular expression, or "Linear" for all."""
    bits: int
    blocks: Granularity
    """Of weights."""
    inputs: InputCast | None
    """None: activations stay in high precision."""

    def has(self, name: str) -> bool:
        """Whether a linear is a target."""
        return any(
            target.lower() == "linear" or target == name or matches(target, name, "targets") for target in self.targets
        )


@dataclass(frozen=True)
class Quantization:
    """What a quantization_config says about weights, activations and the cache."""

    method: str
    kind: str
    """compressed-tensors' name of the format; else the method's."""
    groups: tuple[Group, ...]
    kv_cache: bool

    @property
    def blocks(self) -> tuple[Granularity, ...]:
        """Of weights, a group each."""
        return tuple(group.blocks for group in self.groups)

    def group_of(self, name: str) -> Group | None:
        """The first group that has a linear as its target; None: it stays in high precision."""
        return next((group for group in self.groups if group.has(name)), None)


def matches(pattern: str, name: str, where: str = "ignored layers") -> bool:
    """Whether the regular expression behind "re:" fits the start of a name; its end is open.

    Raises:
        UntrustedError: it is none.
    """
    return pattern.startswith(REGEX) and compiled(pattern.removeprefix(REGEX), where).match(name) is not None


def compiled(pattern: str, where: str = "ignored layers", shown: str = "") -> re.Pattern[str]:
    """A regular expression of a config.

    Raises:
        UntrustedError: it is none.
    """
    try:
        return re.compile(pattern)
    except re.error as error:
        raise UntrustedError(f"pattern {shown or pattern!r} of {where} is no regular expression: {error}") from error


_ARGUMENTS = MappingProxyType(
    {"num_bits": int, "type": str, "strategy": str, "group_size": int, "block_structure": [int]}
)
_GROUP = MappingProxyType({"targets": [str], "weights": _ARGUMENTS, "input_activations": _ARGUMENTS})
_SHAPE = MappingProxyType({"quant_method": str, "weight_block_size": [int], "config_groups": {"*": _GROUP}})
_CONFIG = MappingProxyType(
    dict.fromkeys(("rope_parameters", "rope_scaling", "quantization_config"), dict)
    | dict.fromkeys(("vocab_size", "num_hidden_layers"), int)
)
"""What readers of a config.json take for granted: they get it from `read_config` alone."""


def read_quantization(config: Mapping[str, Any]) -> Quantization:
    """What a quantization_config says.

    Raises:
        UntrustedError: an unknown method, strategy, algorithm or number of bits. What is not known is never taken for
            one scale a tensor.

    Example:
        >>> read_quantization({"quant_method": "fp8", "weight_block_size": [128, 128]}).blocks
        (Granularity(rows=128, cols=128),)
    """
    if wrong := misfit(config, _SHAPE, "quantization_config"):
        raise UntrustedError(f"config.json: {wrong}")
    method = config.get("quant_method")
    if not isinstance(method, str) or method not in IGNORE:
        raise UntrustedError(f"config.json: {unknown_name('quant_method', method, IGNORE)}")
    cache = bool(config.get("kv_cache_scheme") or config.get("kv_cache_quant_algo"))
    if method != "compressed-tensors":
        return Quantization(method, method, (_whole(config, method),), cache)
    groups = tuple(_group(group or {}, config) for group in (config.get("config_groups") or {}).values())
    if not groups:
        raise UntrustedError(
            "config.json: compressed-tensors without config_groups; needs one with its weights' strategy"
        )
    return Quantization(method, str(config.get("format")), groups, cache)


def _whole(config: Mapping[str, Any], method: str) -> Group:
    """The one group of a method that has no targets."""
    block, algorithm = config.get("weight_block_size"), config.get("quant_algo")
    bits, size, inputs = _ALGORITHMS["FP8"]
    if block is not None:
        size = _block(block)
        inputs = Granularity(1, size.cols)
    elif method == "modelopt" and algorithm is not None:
        need_known("config.json", "quant_algo", algorithm, _ALGORITHMS, UntrustedError)
        bits, size, inputs = _ALGORITHMS[algorithm]
    if (scheme := config.get("activation_scheme", "dynamic")) not in ("dynamic", "static"):
        raise UntrustedError(f"config.json: activation_scheme is {scheme!r}; needs 'dynamic' or 'static'")
    static = scheme == "static" or algorithm == "FP8"
    cast = None if inputs is None else InputCast(inputs, _powers(config, size), static)
    return Group(("Linear",), bits, size, cast)


def _group(group: Mapping[str, Any], config: Mapping[str, Any]) -> Group:
    weights, inputs = group.get("weights") or {}, group.get("input_activations")
    if weights.get("type") != "float" or weights.get("num_bits") not in (4, 8):
        raise UntrustedError(
            f"config.json: weights of {weights.get('num_bits')} bits, type {weights.get('type')!r}; only FP8 and "
            "FP4 are read (8 or 4 bits, 'float')"
        )
    size, cast = _size(weights, _WEIGHTS), None
    if inputs:
        if not isinstance(inputs, Mapping):
            raise UntrustedError(f"config.json: input_activations is {inputs!r}; needs an object, or null")
        cast = InputCast(_size(inputs, _INPUTS), _powers(config, size), not inputs.get("dynamic", True))
    return Group(tuple(group.get("targets") or ()), weights["num_bits"], size, cast)


def _powers(config: Mapping[str, Any], size: Granularity) -> bool:
    """Whether the scales of activations are powers of two, if they have blocks."""
    return str(config.get("scale_fmt")) == "ue8m0" or size == BLOCK_1X32


def _size(arguments: Mapping[str, Any], plain: Mapping[str, Granularity]) -> Granularity:
    """The blocks of compressed-tensors' words for a cast; without a strategy it is that of a tensor, as the library has
    it."""
    group = arguments.get("group_size")
    strategy = arguments.get("strategy") or ("tensor" if group is None else "group")
    if strategy in plain:
        return plain[strategy]
    need_known("config.json", "strategy", strategy, (*plain, *_SIZED), UntrustedError)
    return _block(arguments.get("block_structure") if strategy == "block" else [1, group])


def _block(block: Any) -> Granularity:
    try:
        rows, cols = map(operator.index, block)  # None would be the whole extent
        return Granularity(rows, cols)
    except (TypeError, ValueError) as error:
        raise UntrustedError(f"config.json: block size {block!r}; needs two numbers such as [128, 128]") from error


def read_config(folder: Path) -> dict[str, Any]:
    """config.json; ModelOpt's own file stands in for a quantization_config.

    Raises:
        UntrustedError: there is none, or it is damaged.
    """
    path = folder / "config.json"
    if not folder.is_dir():
        raise UntrustedError("is no folder; needs one with config.json and model.safetensors")
    if not path.is_file():
        raise UntrustedError("has no config.json; needs the folder of a checkpoint, as a whole")
    found: dict[str, Any] = {}
    for name in (path.name, MODELOPT):
        if not (folder / name).is_file():
            continue
        try:
            found[name] = parse_json(read_text(folder / name))
        except UntrustedError as error:
            raise UntrustedError(f"{name} {error}") from error
        if not isinstance(found[name], dict):
            raise UntrustedError(f"{name} is no object")
    config: dict[str, Any] = found[path.name]
    own = found.get(MODELOPT, {}).get("quantization")
    if own is not None and not config.get("quantization_config"):
        if not isinstance(own, dict):
            raise UntrustedError(f"{MODELOPT} has a quantization that is no object")
        config["quantization_config"] = {"quant_method": "modelopt", **own}
    if wrong := misfit(config, _CONFIG, "config.json"):
        raise UntrustedError(wrong)
    return config


# --- reading: tensors ------------------------------------------------------------------------------------------------

_FP4 = "F4_E2M1"


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
        weight_map = read_index(index)
    except UntrustedError as error:
        raise UntrustedError(f"{index.name} {error}") from error
    opened = {name: _open(folder, name, files) for name in sorted(set(weight_map.values()))}
    held = {name: set(file.keys()) for name, file in opened.items()}
    if lacking := [key for key, name in weight_map.items() if key not in held[name]]:
        named = f"{listed(lacking, 3)} to {weight_map[lacking[0]]}"
        raise UntrustedError(f"{index.name} maps {named}, which does not hold it")
    if more := sorted(set().union(*held.values()) - weight_map.keys()):
        raise UntrustedError(f"{index.name} does not name {listed(more, 3)}, which its files hold")
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
    for name in list(tensors):
        place, _, last = name.rpartition(".")
        prefix = f"{place}." if place else ""
        if last != "weight_packed" and (last != "weight" or f"{prefix}{_DECODES}" not in tensors):
            continue
        file = tensors.pop(name)
        shape = file.get_slice(name).get_shape()
        if file.get_slice(name).get_dtype() != "U8" or len(shape) != 2 or f"{prefix}weight" in tensors:
            raise UntrustedError(f"{name} is no matrix of bytes, or stands beside {prefix}weight")
        tensors[f"{prefix}weight"] = _Made((shape[0], 2 * shape[1]), _FP4, partial(_nibbles, file, name))
        key = f"{prefix}{_ENCODES if last == 'weight_packed' else _DECODES}"
        scale, whole = f"{prefix}weight_scale", tensors.pop(key, None)
        if whole is not None and (blocks := tensors.get(scale)) is not None:
            size = tuple(blocks.get_slice(scale).get_shape())
            tensors[scale] = _Made(size, "F32", partial(_product, blocks, scale, whole, key))
    return tensors


def _nibbles(file: Any, name: str) -> Tensor:
    packed = file.get_tensor(name)
    return torch.stack([packed & 15, packed >> 4], -1).flatten(1)


def _product(blocks: Any, scale: str, whole: Any, name: str) -> Tensor:
    """The scales of blocks times that of the tensor, or its inverse, if it quantizes."""
    factor = whole.get_tensor(name).float()
    if factor.numel() != 1 or not 0 < float(factor) < torch.inf:
        raise UntrustedError(f"{name} holds {factor.numel()} numbers; needs one, positive and finite")
    decodes = factor if name.endswith(_DECODES) else factor.reciprocal()
    product: Tensor = blocks.get_tensor(scale).float() * decodes.reshape(())
    return product


def _open(folder: Path, name: str, files: ExitStack) -> Any:
    from safetensors import SafetensorError, safe_open

    path = folder / name
    regular_size(path)
    try:
        file = files.enter_context(safe_open(path, framework="pt"))
    except (SafetensorError, OSError) as error:  # of a file that cannot be mapped, too
        raise UntrustedError(f"{name} is no safetensors file, or cut short ({error})") from error
    with opened(path) as stream:  # the library takes the last of two equal keys
        header = stream.read(int.from_bytes(stream.read(8), "little"))
    try:
        parse_json(header)
    except UntrustedError as error:
        raise UntrustedError(f"the header of {name} {error}") from error
    return file


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
    return last in (*INPUT_KEYS, *_OTHER_SCALES) or (
        last in SCALE_KEYS and weight in tensors and is_codes(weight, tensors)
    )


def scales_of(key: str, tensors: Mapping[str, Any], sizes: Sequence[Granularity]) -> tuple[Tensor, QuantizationSpec]:
    """The scales of codes, fp32 in the shape of their blocks, and the spec that they fit.

    Raises:
        UntrustedError: it has no scales, or they fit no block size of the config.
    """
    prefix = key.removesuffix("weight")
    scales = [name for name in SCALE_KEYS if prefix + name in tensors]
    if not scales:
        raise UntrustedError(f"{key} is in FP8, and has neither {SCALE_KEYS[0]} nor {SCALE_KEYS[1]} beside it")
    if len(scales) > 1:
        raise UntrustedError(
            f"{key} has both {SCALE_KEYS[0]} and {SCALE_KEYS[1]} beside it: nobody can know which holds"
        )
    scale_key = prefix + scales[0]
    shape = tuple(tensors[key].get_slice(key).get_shape())
    if len(shape) != 2:
        raise UntrustedError(f"{key} holds codes of shape {shape}; needs a matrix")
    scale_inv, size = _scales(scale_key, tensors[scale_key].get_tensor(scale_key), shape, sizes)
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


def _scales(
    key: str, found: Tensor, shape: tuple[int, int], sizes: Sequence[Granularity]
) -> tuple[Tensor, Granularity]:
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
