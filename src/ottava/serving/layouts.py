"""The layouts of FP8 checkpoints that inference engines read. A new layout is one entry of `LAYOUTS`.

Every stored scale is the factor that dequantizes, under whatever name. Sources: compressed-tensors 0.20
(quant_config.py), transformers 5.23 (FineGrainedFP8Config), ModelOpt's hf_quant_config.json as vLLM reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor

from ottava.numerics.formats import E2M1, E4M3
from ottava.numerics.rounding import code_values, round_to_format
from ottava.numerics.scaling import (
    BLOCK_1X16,
    BLOCK_1X32,
    BLOCK_16X16,
    BLOCK_128X128,
    PER_ROW,
    PER_TENSOR,
    Granularity,
    amax,
)
from ottava.numerics.tensor import QuantizationSpec, QuantizedTensor

ScaleDtype = Literal["fp32", "e8m0", "uint8", "e4m3"]


@dataclass(frozen=True)
class Layout:
    """How a checkpoint stores weights and their scales, and what its config.json says."""

    name: str
    spec: QuantizationSpec | None
    """The cast of the weights; None: BF16."""
    scale_key: str = "weight_scale"
    """Beside NAME.weight stands NAME.scale_key."""
    scale_dtype: ScaleDtype = "fp32"
    """e8m0 and uint8 hold the exponent of a power of two; e4m3 stands beside one fp32 scale for the tensor."""
    config: Callable[[Facts], dict[str, Any]] | None = None
    """The quantization_config of config.json."""
    static: bool = False
    """Whether engines need a scale of the activations in the checkpoint (NAME.input_scale)."""

    packed: bool = False
    """Whether codes of 4 bits lie in pairs in NAME.weight_packed, the first one in the low bits."""

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
        return torch.tensor(scales.pop()) if len(scales) == 1 else None

    def tensors(self, cast: QuantizedTensor, common: Tensor | None = None) -> dict[str, Tensor]:
        """The tensors of a weight by their own names.

        Args:
            common: of the linears that engines join with it; None: its own.
        Raises:
            ValueError: scales that the layout cannot store.
        """
        if not self.packed:
            return {"weight": cast.data, self.scale_key: self.stored_scale(cast.scale_inv.cpu()).clone()}
        codes = cast.data.cpu()
        made = {"weight_packed": codes[:, ::2] | codes[:, 1::2] << 4}
        if self.scale_dtype != "e4m3":
            return made | {self.scale_key: self.stored_scale(cast.scale_inv.cpu()).clone()}
        encode = tensor_scale([cast]) if common is None else common
        if encode is None:
            raise ValueError(f"layout {self.name!r}: the scales are no E4M3 numbers times one number of the tensor")
        blocks = torch.where(_used(cast), cast.scale_inv.cpu() / encode.reciprocal(), 0.0)
        rows = round_to_format(blocks, E4M3).repeat_interleave(cast.spec.granularity.rows or 1, 0)[: codes.shape[0]]
        return made | {self.scale_key: rows.to(torch.float8_e4m3fn), "weight_global_scale": encode.reshape(1).clone()}

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


@dataclass(frozen=True)
class Facts:
    """What a quantization_config depends on."""

    ignored: Sequence[str]
    """Linear modules that stay in BF16, by their names in the checkpoint."""
    static: bool
    kv_cache: bool


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
        return torch.ones(())
    for block in code_values(E4M3)[1:127].flip(0):  # 448 and down
        near = block / products[-1]
        for encode in (near, near.nextafter(torch.zeros(())), near.nextafter(torch.full((), torch.inf))):
            tensor = encode.reciprocal()
            if torch.equal(round_to_format(products / tensor, E4M3) * tensor, products):
                return torch.as_tensor(encode)
    return None


def _used(cast: QuantizedTensor) -> Tensor:
    """The blocks that hold a number beside 0."""
    return amax((cast.data.cpu() & 7).float(), cast.spec.granularity) > 0


_FP8 = MappingProxyType({"num_bits": 8, "type": "float", "symmetric": True})
_BY_TOKEN = MappingProxyType({"dynamic": True, "strategy": "token"})


def _compressed(
    strategy: str,
    activations: Mapping[str, Any] | None,
    *,
    kind: str = "float-quantized",
    **more: Any,
) -> Any:
    def config(facts: Facts) -> dict[str, Any]:
        own = None if activations is None else {**_FP8, **activations, **({"dynamic": False} if facts.static else {})}
        return {
            "quant_method": "compressed-tensors",
            "format": kind,
            "quantization_status": "compressed",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {**_FP8, "dynamic": False, "strategy": strategy, **more},
                    "input_activations": own,
                    "output_activations": None,
                }
            },
            "ignore": list(facts.ignored),
            "kv_cache_scheme": {**_FP8, "strategy": "tensor", "dynamic": False} if facts.kv_cache else None,
            "global_compression_ratio": None,
        }

    return config


def _fine_grained(method: str, block: list[int], **more: Any) -> Any:
    def config(facts: Facts) -> dict[str, Any]:
        own = {"quant_method": method, "activation_scheme": "dynamic", "weight_block_size": block, **more}
        return own | {"modules_to_not_convert": list(facts.ignored)}

    return config


def _modelopt(facts: Facts) -> dict[str, Any]:
    return {
        "quant_method": "modelopt",
        "quant_algo": "FP8",
        "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"} if facts.kv_cache else None,
        "ignore": list(facts.ignored),
        "producer": {"name": "ottava"},
    }


_BLOCKS = QuantizationSpec(E4M3, BLOCK_128X128)
_POWERS = QuantizationSpec(E4M3, BLOCK_128X128, "pow2")
_MX = QuantizationSpec(E4M3, BLOCK_1X32, "e8m0")
_BY_GROUP = MappingProxyType({"dynamic": True, "strategy": "group", "group_size": 128})
_BY_MX = MappingProxyType({"dynamic": True, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"})
_MX4 = MappingProxyType({"num_bits": 4, "group_size": 32, "scale_dtype": "torch.uint8"})
_BY_MX4 = MappingProxyType({"dynamic": True, "strategy": "group", **_MX4})
_NV4 = MappingProxyType({"num_bits": 4, "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"})
_BY_TENSOR = MappingProxyType({"dynamic": True, "strategy": "tensor"})

_ENTRIES = (
    Layout("bf16", None),
    Layout(
        "compressed-tensors-block",
        _BLOCKS,
        config=_compressed("block", _BY_GROUP, block_structure=[128, 128]),
    ),
    Layout("compressed-tensors-channel", QuantizationSpec(E4M3, PER_ROW), config=_compressed("channel", _BY_TOKEN)),
    Layout("compressed-tensors-tensor", QuantizationSpec(E4M3), config=_compressed("tensor", _BY_TENSOR)),
    Layout(
        "compressed-tensors-mxfp8",
        _MX,
        scale_dtype="uint8",
        config=_compressed("group", _BY_MX, kind="mxfp8-quantized", group_size=32, scale_dtype="torch.uint8"),
    ),
    Layout(
        "compressed-tensors-mxfp4",
        QuantizationSpec(E2M1, BLOCK_1X32, "e8m0"),
        scale_dtype="uint8",
        config=_compressed("group", _BY_MX4, kind="mxfp4-pack-quantized", **_MX4),
        packed=True,
    ),
    Layout(
        "compressed-tensors-nvfp4",
        QuantizationSpec(E2M1, BLOCK_1X16, "e4m3"),
        scale_dtype="e4m3",
        config=_compressed("tensor_group", None, kind="nvfp4-pack-quantized", **_NV4),
        packed=True,
    ),
    Layout("fp8-block", _BLOCKS, "weight_scale_inv", config=_fine_grained("fp8", [128, 128])),
    Layout(
        "fp8-block-ue8m0",
        _POWERS,
        "weight_scale_inv",
        "e8m0",
        config=_fine_grained("fp8", [128, 128], scale_fmt="ue8m0"),
    ),
    Layout("mxfp8", _MX, "weight_scale_inv", "uint8", config=_fine_grained("mxfp8", [1, 32], scale_fmt="ue8m0")),
    Layout("modelopt", QuantizationSpec(E4M3), config=_modelopt, static=True),
)

LAYOUTS: Mapping[str, Layout] = MappingProxyType({layout.name: layout for layout in _ENTRIES})
DEFAULT = "compressed-tensors-block"
"""The one layout that transformers, vLLM and SGLang read under the same names."""
