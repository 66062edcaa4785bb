"""TransformerEngine's quantizers: each is the `QuantizationSpec` of a cast, and gives a tensor of `tensors`.

A quantizer casts x by rows, for the GEMM that sums over the last dimension, and by columns, for the GEMM that sums over
the others. `specs` gives both cells, so a `CustomRecipe` of quantizers is a recipe of ottava. Beside them stands the
tensor whose rows and columns are cast by different quantizers.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ottava.compat.transformer_engine.common import recipe
from ottava.compat.transformer_engine.pytorch.tensors import (
    FORMATS,
    DType,
    Float8BlockwiseQTensor,
    Float8Tensor,
    IdentityTensor,
    MXFP8Tensor,
    NVFP4Tensor,
    QuantizedTensor,
    cast_rows_alone,
    get_fp8_te_dtype,
    quantized,
    refuse_unlike,
)
from ottava.numerics import formats
from ottava.numerics.scaling import (
    BLOCK_1X16,
    BLOCK_1X32,
    BLOCK_1X128,
    BLOCK_128X128,
    PER_TENSOR,
    TE_FOUR_OVER_SIX,
    Granularity,
    amax,
)
from ottava.numerics.tensor import QuantizationSpec
from ottava.numerics.tensor import QuantizedTensor as Codes
from ottava.numerics.transforms import Hadamard
from ottava.ops.quantize import quantize


class HybridQuantizedTensor(QuantizedTensor):
    """Rows and columns by different quantizers, each direction a tensor of its own quantizer.

    `quantized_model_init` with a CustomRecipe whose factory gives a `HybridQuantizer` for weights stores them so.
    """

    hybrid = True
    _rowwise_storage = rowwise_sub_storage = property(lambda self: self._halves[0])
    _columnwise_storage = columnwise_sub_storage = property(lambda self: self._halves[1])
    _halves: list[QuantizedTensor | None]
    """Rows and columns; they hold the codes."""

    @staticmethod
    def __new__(cls, shape: Any = None, dtype: Any = None, *parts: Any, **theirs: Any) -> Any:
        """As `QuantizedTensor`, or of TransformerEngine's rowwise_storage and columnwise_storage, whose shape is the
        default; fake_dtype is another name of dtype."""
        if parts or "rowwise_storage" not in theirs:
            return QuantizedTensor.__new__(cls, shape, dtype, *parts, **theirs)
        row, column, quantizer = (theirs.get(n) for n in ("rowwise_storage", "columnwise_storage", "quantizer"))
        if not hasattr(quantizer, "columnwise_quantizer"):
            raise TypeError(f"{cls.__name__} requires a parent HybridQuantizer; got {quantizer!r}: give quantizer=")
        turned = column
        if column is not None and column.columns is None:  # rows alone: one scale serves both directions
            turned = column._like(column.shape, None, column.rows.t())
        halves = None if row is None else row.rows, None if turned is None else turned.columns
        first = column if row is None else row
        shape, dtype = shape or getattr(first, "shape", None), dtype or theirs.get("fake_dtype")
        return QuantizedTensor.__new__(cls, shape, dtype, *halves, quantizer, theirs.get("requires_grad", False))

    def _held(self, turned: bool) -> Codes | Tensor | None:
        half = self._halves[turned]
        return None if half is None else half._held(turned)

    def _put(self, turned: bool, codes: Codes | Tensor | None) -> None:
        halves = self.__dict__.setdefault("_halves", [None, None])
        half = halves[turned]
        if half is not None and codes is not None:
            half._put(turned, codes)
            return
        own = self._quantizer.columnwise_quantizer if turned else self._quantizer.rowwise_quantizer
        pair = (None, codes) if turned else (codes, None)
        halves[turned] = None if codes is None else own.tensor_class(self.shape, self.dtype, *pair, own)

    def _laid(self, turned: bool, part: int) -> Tensor | None:
        half = self._halves[turned]
        return None if half is None else half._laid(turned, part)

    def fsdp_pre_all_gather(
        self, mesh: Any, orig_size: Any, contiguous_orig_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
        """What FSDP2 gathers of a shard: for each direction codes, and scales where they have rows of their own.

        Raises:
            NotImplementedError: NVFP4 codes, whose amax is that of a whole tensor.
            ValueError: ranks have different scales of a tensor.
        """
        parts: list[Tensor] = []
        for turned, name in ((False, "rowwise"), (True, "columnwise")):
            codes = self._held(turned)
            if isinstance(self._halves[turned], NVFP4Tensor):
                raise NotImplementedError(
                    f"HybridQuantizedTensor: the {name} sub-storage is an NVFP4Tensor, which has no "
                    "fsdp_buffer_fields: its codes belong to the amax of a whole tensor. Use a supported "
                    "sub-quantizer, or NVFP4 alone with square blocks"
                )
            held: list[Any] = [codes.data.view(torch.uint8), codes.scale_inv] if isinstance(codes, Codes) else [codes]
            if isinstance(codes, Codes) and codes.spec.granularity == PER_TENSOR:
                refuse_unlike(held.pop(), mesh, "scales", type(self).__name__)
            parts += [(part.t() if turned else part).contiguous() for part in held if part is not None]
        return tuple(parts), (self._held(False), self._held(True))

    def fsdp_post_all_gather(
        self, all_gather_outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> tuple[Any, Any]:
        """The whole tensor, or out with new codes; and what FSDP2 frees."""
        left, rows = list(all_gather_outputs), 0
        halves: list[Any] = []
        for turned, shard in enumerate(metadata):
            if shard is not None:
                data = left.pop(0)
                rows, data = len(data), data.t().contiguous() if turned else data
                if isinstance(shard, Codes):
                    whole = shard.spec.granularity == PER_TENSOR
                    scales = shard.scale_inv if whole else left.pop(0).t().contiguous() if turned else left.pop(0)
                    data = replace(shard, data=data.view(shard.data.dtype), scale_inv=scales)
            halves.append(None if shard is None else data)
        if out is not None:
            out.rows, out.columns = halves
        made = out if out is not None else self._like((rows, *self.shape[1:]), halves[0], halves[1], param_dtype)
        return made, all_gather_outputs


HybridQuantizedTensorStorage = HybridQuantizedTensor


Cells = tuple[QuantizationSpec | None, QuantizationSpec | None]
"""Of x and of x.T; None stays in high precision."""


def _format(where: str, dtype: Any) -> formats.Format:
    if DType.cast(dtype) not in FORMATS:
        raise ValueError(f"{where}: got {dtype!r}; needs DType.kFloat8E4M3, kFloat8E5M2 or kFloat4E2M1")
    return FORMATS[DType.cast(dtype)]


class Quantizer:
    """The base class of quantizers.

    Args:
        rowwise, columnwise: which of the two casts a call makes.
    """

    tensor_class: type[QuantizedTensor] = QuantizedTensor
    """Of what a call makes."""
    recipe_class: type[recipe.Recipe] = recipe.CustomRecipe
    """Under which layers cast so."""
    internal = False
    optimize_for_gemm = False
    dtype: Any = DType.kFloat8E4M3
    with_amax_reduction = False

    def __init__(self, *, rowwise: bool = True, columnwise: bool = True) -> None:
        self.rowwise_usage, self.columnwise_usage = rowwise, columnwise

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(
            f"{type(self).__name__}.{name} is not in ottava: specs() gives the cells of the casts, and "
            "quantize(x) makes them"
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rowwise={self.rowwise_usage}, columnwise={self.columnwise_usage})"

    def _value(self) -> tuple[Any, ...]:
        """The class and its settings: quantizers that cast alike are equal, and torch.compile takes them as constants.

        Raises:
            TypeError: a process group, which is no constant.
        """
        if isinstance(group := self.__dict__.get("amax_reduction_group"), dist.ProcessGroup):
            raise TypeError(f"{type(self).__name__}: got amax_reduction_group={group}, which is no constant of a graph")
        return type(self), *sorted((name, value) for name, value in vars(self).items() if value is not None)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Quantizer) and self._value() == other._value()

    def __hash__(self) -> int:
        return hash(self._value())

    def __fx_repr__(self) -> tuple[str, dict[str, Any]]:
        cls, *settings = self._value()
        plain = {name: int(value) if isinstance(value, DType) else value for name, value in settings}
        return f"_remade({cls.__name__}, {plain!r})", {"_remade": _remade, cls.__name__: cls}

    def specs(self, tensor: str = "") -> Cells:
        """The cells of a tensor of a linear layer: "input", "weight" or "grad_output".

        Raises:
            TypeError: this class says nothing of it: a subclass of a script has no spec.
        """
        raise TypeError(
            f"{type(self).__name__}: a cast by the code of a class of your own is not in ottava's recipes; needs the "
            "spec of the cast: write an ottava.QuantizationSpec, or give the class a method specs() that returns two"
        )

    def cast(self, matrix: Tensor, *, columns: bool = False) -> Codes | None:
        """The codes of a matrix, or of its transpose; None: it stays in high precision."""
        spec, own = self.specs()[columns], matrix.t().contiguous() if columns else matrix
        return None if spec is None else quantize(own, spec, scale=self.given(own, spec))

    def given(self, matrix: Tensor, spec: QuantizationSpec) -> Tensor | None:
        """The scale of a matrix, fp32 (1,); None: that of its amaxes."""
        return None

    def __call__(self, tensor: Tensor) -> Tensor:
        """The quantized tensor; gradients pass through it unchanged."""
        return self.quantize(tensor)

    def quantize(self, tensor: Tensor, *, out: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """The quantized tensor, or out with new numbers.

        Args:
            dtype: the dtype that the result shows; None: that of the tensor.
        """
        if out is not None:
            return self.update_quantized(tensor, out)  # type: ignore[no-any-return]
        return quantized(self, tensor, dtype)

    def update_quantized(self, src: Tensor, dst: Any, *, noop_flag: Tensor | None = None) -> Any:
        """Casts src into dst, which is returned; nothing happens where noop_flag is not 0."""
        if noop_flag is None or not bool(noop_flag.any()):
            dst.quantize_with(self, src)
        return dst

    def multi_quantize(self, list_of_tensors: Sequence[Tensor]) -> list[Tensor]:
        """A quantized tensor for each tensor."""
        return [self(tensor) for tensor in list_of_tensors]

    def make_empty(
        self,
        shape: Sequence[int],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        requires_grad: bool = False,
        pin_memory: bool = False,
    ) -> Tensor:
        """A quantized tensor of zeros: ottava has no codes without a meaning."""
        own, settings = copy.copy(self), dict(vars(self))
        own.with_amax_reduction = False  # of zeros, on this rank alone
        made = own.quantize(torch.zeros(tuple(shape), device=device, dtype=torch.float32), dtype=dtype)
        own.__dict__ = settings
        return made.requires_grad_(requires_grad)

    def set_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        """Changes which casts a call makes; None changes nothing."""
        self.rowwise_usage = self.rowwise_usage if rowwise is None else rowwise
        self.columnwise_usage = self.columnwise_usage if columnwise is None else columnwise

    def get_usages(self) -> dict[str, bool]:
        """Which casts a call makes."""
        return {"rowwise": self.rowwise_usage, "columnwise": self.columnwise_usage}

    def _get_compatible_recipe(self) -> type[recipe.Recipe]:
        return self.recipe_class

    def copy(self) -> Any:
        """A quantizer with the same settings, and the same scale and amax where it has them."""
        return copy.copy(self)

    def is_quantizable(self, inp: Tensor) -> bool:
        """True: ottava pads what blocks do not divide."""
        return True

    def is_requantization_safe(self) -> bool:
        """Whether a second cast gives the codes of the first: no state, no random numbers, no code of a script."""
        if type(self).specs is Quantizer.specs or isinstance(self, Float8Quantizer):
            return False
        return all(spec is None or spec.rounding != "stochastic" for spec in self.specs())

    def supports_only_rowwise_all_gather(self) -> bool:
        """Whether ranks exchange codes of rows alone: both casts then have the same codes."""
        row, col = self.specs()
        return row is not None and row == col and row.granularity.transposes and row.transform is None


def _remade(cls: type[Quantizer], settings: dict[str, Any]) -> Quantizer:
    made = cls.__new__(cls)
    vars(made).update(settings, dtype=DType.cast(settings["dtype"]))
    return made


class Float8Quantizer(Quantizer):
    """One scale a tensor, which the caller gives: that of delayed scaling.

    Args:
        scale: fp32, one entry: codes are those of x * scale.
        amax: fp32, one entry; a cast writes the largest magnitude of x into it.
        fp8_dtype: DType.kFloat8E4M3 or kFloat8E5M2.
    """

    tensor_class, recipe_class = Float8Tensor, recipe.DelayedScaling
    __eq__, __hash__ = object.__eq__, object.__hash__  # it has a state

    def __init__(self, scale: Tensor, amax: Tensor, fp8_dtype: Any, **usage: bool) -> None:
        super().__init__(**usage)
        self.scale, self.amax, self.dtype = scale, amax, DType.cast(fp8_dtype)

    def specs(self, tensor: str = "") -> Cells:
        """As `Quantizer.specs`."""
        return (QuantizationSpec(_format("Float8Quantizer", self.dtype)),) * 2

    def given(self, matrix: Tensor, spec: QuantizationSpec) -> Tensor:
        """The scale; the amax is kept."""
        self.amax.copy_(torch.maximum(self.amax, amax(matrix.detach()).view_as(self.amax)))
        return self.scale.reshape(1)

    def calibrate(self, tensor: Tensor) -> None:
        """Writes the largest magnitude of a tensor into amax."""
        self.amax.copy_(tensor.detach().abs().amax().float())


def _no_floor(where: str, amax_epsilon: float) -> None:
    if amax_epsilon:
        raise NotImplementedError(
            f"{where}: amax_epsilon={amax_epsilon!r} is not in ottava: the scale of a tiny block, or of a tensor in a "
            "recipe, ends at FP32's largest number. Leave it out"
        )


class Float8CurrentScalingQuantizer(Quantizer):
    """One scale a tensor, from its own amax; with_amax_reduction: from the largest one on the ranks of the group."""

    tensor_class, recipe_class = Float8Tensor, recipe.Float8CurrentScaling

    def __init__(
        self,
        fp8_dtype: Any,
        device: torch.device | str | None = None,
        *,
        with_amax_reduction: bool = False,
        amax_reduction_group: dist.ProcessGroup | None = None,
        force_pow_2_scales: bool = False,
        amax_epsilon: float = 0.0,
        **usage: bool,
    ) -> None:
        super().__init__(**usage)
        self.dtype, self.force_pow_2_scales, self.amax_epsilon = DType.cast(fp8_dtype), force_pow_2_scales, amax_epsilon
        self.with_amax_reduction, self.amax_reduction_group = with_amax_reduction, amax_reduction_group

    def given(self, matrix: Tensor, spec: QuantizationSpec) -> Tensor | None:
        """A tensor below amax_epsilon has the scale of that amax."""
        if not (self.amax_epsilon or self.with_amax_reduction):
            return None
        largest = amax(matrix.detach())
        if self.with_amax_reduction and dist.is_initialized():
            dist.all_reduce(largest, dist.ReduceOp.MAX, self.amax_reduction_group)
        return spec.scale_of(largest.clamp(min=self.amax_epsilon)).scale.view(1)

    def specs(self, tensor: str = "") -> Cells:
        """As `Quantizer.specs`."""
        _no_floor("Float8CurrentScalingQuantizer", self.amax_epsilon if tensor else 0.0)
        scales: Any = "pow2" if self.force_pow_2_scales else "fp32"
        return (QuantizationSpec(_format("Float8CurrentScalingQuantizer", self.dtype), scale_format=scales),) * 2


class Float8BlockQuantizer(Quantizer):
    """Blocks of 1x128 (block_scaling_dim=1) or 128x128 (2)."""

    tensor_class, recipe_class = Float8BlockwiseQTensor, recipe.Float8BlockScaling

    block_len = 128

    def __init__(
        self,
        fp8_dtype: Any,
        *,
        amax_epsilon: float = 0.0,
        force_pow_2_scales: bool = True,
        block_scaling_dim: int = 2,
        **usage: bool,
    ) -> None:
        super().__init__(**usage)
        _no_floor("Float8BlockQuantizer", amax_epsilon)
        if block_scaling_dim not in (1, 2):
            raise ValueError(f"Float8BlockQuantizer: got block_scaling_dim={block_scaling_dim!r}; needs 1 or 2")
        self.dtype, self.force_pow_2_scales, self.amax_epsilon = DType.cast(fp8_dtype), force_pow_2_scales, amax_epsilon
        self.block_scaling_dim = block_scaling_dim

    def specs(self, tensor: str = "") -> Cells:
        """As `Quantizer.specs`."""
        blocks = BLOCK_1X128 if self.block_scaling_dim == 1 else BLOCK_128X128
        scales: Any = "pow2" if self.force_pow_2_scales else "fp32"
        return (QuantizationSpec(_format("Float8BlockQuantizer", self.dtype), blocks, scales),) * 2


class MXFP8Quantizer(Quantizer):
    """Blocks of 32 with E8M0 scales, or of 32x32."""

    tensor_class, recipe_class = MXFP8Tensor, recipe.MXFP8BlockScaling

    def __init__(self, fp8_dtype: Any, *, with_2d_quantization: bool = False, **usage: bool) -> None:
        super().__init__(**usage)
        self.dtype, self.with_2d_quantization = DType.cast(fp8_dtype), with_2d_quantization

    def specs(self, tensor: str = "") -> Cells:
        """As `Quantizer.specs`."""
        blocks = Granularity(32, 32) if self.with_2d_quantization else BLOCK_1X32
        return (QuantizationSpec(_format("MXFP8Quantizer", self.dtype), blocks, "e8m0"),) * 2


class NVFP4Quantizer(Quantizer):
    """Blocks of 16 with E4M3 scales below one of FP32; Hadamard transforms and stochastic rounding as asked."""

    tensor_class, recipe_class = NVFP4Tensor, recipe.NVFP4BlockScaling

    def __init__(
        self,
        fp4_dtype: Any = DType.kFloat4E2M1,
        rowwise: bool = True,
        columnwise: bool = True,
        with_amax_reduction: bool = False,
        amax_reduction_group: dist.ProcessGroup | None = None,
        with_rht: bool = False,
        with_post_rht_amax: bool = False,
        with_2d_quantization: bool = False,
        stochastic_rounding: bool = False,
        row_scaled_nvfp4: bool = False,
        nvfp4_use_4over6: bool = False,
        nvfp4_e4m3_max: int = 448,
        nvfp4_4over6_err_mode: str = "MAE",
        with_random_sign_mask: bool = True,
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        if with_rht and not with_post_rht_amax:
            raise NotImplementedError(
                "NVFP4Quantizer: with_rht=True without with_post_rht_amax is not in ottava: amaxes are those of the "
                "turned tensor. Give both"
            )
        bound = float(nvfp4_e4m3_max if nvfp4_use_4over6 else 448)
        if (bound, nvfp4_4over6_err_mode) not in TE_FOUR_OVER_SIX.values():
            raise ValueError(
                f"NVFP4Quantizer: got nvfp4_e4m3_max={nvfp4_e4m3_max} and err_mode={nvfp4_4over6_err_mode!r}; needs "
                "448 or 256, and 'MAE' or 'MSE'"
            )
        self.dtype, self.with_rht, self.with_post_rht_amax = DType.cast(fp4_dtype), with_rht, with_post_rht_amax
        self.with_amax_reduction, self.amax_reduction_group = with_amax_reduction, amax_reduction_group
        self.with_2d_quantization, self.stochastic_rounding = with_2d_quantization, stochastic_rounding
        self.row_scaled_nvfp4, self.nvfp4_use_4over6 = row_scaled_nvfp4, nvfp4_use_4over6
        self.nvfp4_e4m3_max, self.nvfp4_4over6_err_mode = int(bound), nvfp4_4over6_err_mode
        self.with_random_sign_mask = with_random_sign_mask

    def make_empty(self, shape: Sequence[int], **others: Any) -> Tensor:
        """As `Quantizer.make_empty`. Scales behind the transform, and those of squares, get the order of tensor cores
        with the first cast, if blocks of 64 x 128, or 128 x 128, do not divide the matrix: as TransformerEngine's
        kernels write them."""
        made: Any = super().make_empty(shape, **others)
        every = 64 if self.with_rht else 128 if self.with_2d_quantization else 0
        made._in_order = every > 0 and bool(made.shape[-1] % 128 or made.numel() // made.shape[-1] % every)
        return made  # type: ignore[no-any-return]

    def is_quantizable(self, inp: Tensor) -> bool:
        """False where rows have scales of their own, as TransformerEngine answers."""
        return not self.row_scaled_nvfp4

    def cast(self, matrix: Tensor, *, columns: bool = False) -> Codes:
        """As `Quantizer.cast`, with the amax of the tensor, or of each row, where rows are tensors of their own."""
        own, spec = matrix.t().contiguous() if columns else matrix, self.specs()[columns]
        assert spec is not None
        if self.with_amax_reduction and dist.is_initialized() and dist.get_world_size(self.amax_reduction_group) > 1:
            raise NotImplementedError(
                "NVFP4Quantizer: with_amax_reduction is not in ottava: its scale is that of this rank's tensor. Cast "
                "the whole tensor, or leave it out"
            )
        if self.row_scaled_nvfp4:
            return cast_rows_alone(own, spec)
        codes = quantize(own, spec)
        return replace(codes, dtype=matrix.dtype, amax=amax(codes.transformed(own), PER_TENSOR))

    def specs(self, tensor: str = "") -> Cells:
        """As `Quantizer.specs`: the transform is for columns only, as in TransformerEngine."""
        row = QuantizationSpec(
            _format("NVFP4Quantizer", self.dtype),
            Granularity(16, 16) if self.with_2d_quantization else BLOCK_1X16,
            "e4m3",
            rounding="stochastic" if self.stochastic_rounding else "nearest_even",
            block_scale=recipe.FOUR_OVER_SIX[float(self.nvfp4_e4m3_max), self.nvfp4_4over6_err_mode]
            if self.nvfp4_use_4over6
            else "amax",
        )
        turned = Hadamard(signs="nvidia" if self.with_random_sign_mask else "none")
        return row, replace(row, transform=turned) if self.with_rht else row


with contextlib.suppress(ImportError, TypeError):  # no public interface of torch yet; 2.11 asks for its own metaclass
    from torch._library.opaque_object import register_opaque_type

    for _constant in (Float8CurrentScalingQuantizer, Float8BlockQuantizer, MXFP8Quantizer, NVFP4Quantizer):
        register_opaque_type(_constant, typ="value")


class IdentityQuantizer(Quantizer):
    """Leaves a tensor in high precision; in its dtype, or in the quantizer's where that has one."""

    tensor_class = IdentityTensor

    def __init__(self, *, dtype: torch.dtype | None = None, **usage: bool) -> None:
        super().__init__(**usage)
        self.dtype = dtype

    def quantize(self, tensor: Tensor, *, out: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """As `Quantizer.quantize`."""
        given = tensor if self.dtype is None or out is not None else tensor.to(self.dtype)
        return super().quantize(given, out=out, dtype=self.dtype or dtype)

    def specs(self, tensor: str = "") -> Cells:
        """As `Quantizer.specs`."""
        return None, None


class HybridQuantizer(Quantizer):
    """One quantizer for rows and another one for columns.

    Args:
        columnwise_source: "original": both cast the tensor itself. "rowwise_dequantized": the second casts what the
            first one gives back.
    Raises:
        TypeError: a quantizer is a request.  ValueError: both are one object, or the source is unknown.
    """

    tensor_class = HybridQuantizedTensor

    def __init__(
        self, *, rowwise_quantizer: Quantizer, columnwise_quantizer: Quantizer, columnwise_source: str = "original"
    ) -> None:
        super().__init__()
        for name, one in (("rowwise", rowwise_quantizer), ("columnwise", columnwise_quantizer)):
            if isinstance(one, QuantizerRequest):
                raise TypeError(
                    f"HybridQuantizer: {name}_quantizer is a {type(one).__name__} (a QuantizerRequest); needs a "
                    "quantizer: a tensor has one history"
                )
        if rowwise_quantizer is columnwise_quantizer:
            raise ValueError("HybridQuantizer: got one object twice; needs distinct quantizers: give it a copy()")
        if columnwise_source not in ("original", "rowwise_dequantized"):
            raise ValueError(
                f"HybridQuantizer: got columnwise_source={columnwise_source!r}; needs 'original' or "
                "'rowwise_dequantized'"
            )
        self.rowwise_quantizer, self.columnwise_quantizer = rowwise_quantizer, columnwise_quantizer
        self.columnwise_source = columnwise_source

    def specs(self, tensor: str = "") -> Cells:
        """As `Quantizer.specs`."""
        return self.rowwise_quantizer.specs(tensor)[0], self.columnwise_quantizer.specs(tensor)[1]

    def cast(self, matrix: Tensor, *, columns: bool = False) -> Codes | None:
        """As `Quantizer.cast`, by the quantizer of the direction."""
        if not columns:
            return self.rowwise_quantizer.cast(matrix)
        if self.columnwise_source != "original" and (row := self.rowwise_quantizer.cast(matrix)) is not None:
            matrix = row.dequantize()
        return self.columnwise_quantizer.cast(matrix, columns=True)

    def is_requantization_safe(self) -> bool:
        """As `Quantizer.is_requantization_safe`, of the casts that a call makes."""
        row, column = (q.is_requantization_safe() for q in (self.rowwise_quantizer, self.columnwise_quantizer))
        rows_count = self.rowwise_usage or (self.columnwise_usage and self.columnwise_source != "original")
        return (row or not rows_count) and (column or not self.columnwise_usage)

    def copy(self) -> HybridQuantizer:
        """As `Quantizer.copy`, of both quantizers, too."""
        made = copy.copy(self)
        made.rowwise_quantizer, made.columnwise_quantizer = (
            q.copy() for q in (self.rowwise_quantizer, self.columnwise_quantizer)
        )
        return made


@dataclass(frozen=True)
class QuantizerRequest:
    """What a factory returns instead of a quantizer where ottava is to keep its state."""


@dataclass(frozen=True)
class DelayedScalingRequest(QuantizerRequest):
    """Delayed scaling, with the fields of the recipe."""

    fp8_format: recipe.Format = recipe.Format.HYBRID
    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: Any = "max"
    scaling_factor_compute_algo: Any = None
    reduce_amax: bool = True

    def specs(self, tensor: str) -> Cells:
        """As `Quantizer.specs`."""
        if not self.reduce_amax:
            raise NotImplementedError("DelayedScalingRequest: reduce_amax=False is not in ottava; give DelayedScaling")
        return recipe.DelayedScaling(**vars(self)).ottava.cells(tensor)


def high_precision_factory(role: Any) -> IdentityQuantizer:
    """Everything in high precision."""
    return IdentityQuantizer()


def delayed_scaling_factory(role: Any) -> DelayedScalingRequest:
    """The cells of DelayedScaling()."""
    return DelayedScalingRequest()


def _again(role: Any, row: Quantizer, column: Quantizer, gradient: Quantizer, other: Quantizer) -> Any:
    """Input and weight by row forward, and what it gives, decoded, by column backward."""
    tensor = "" if role is None else role.tensor_type
    if tensor not in ("input", "weight"):
        return gradient if tensor == "grad_output" else other
    return HybridQuantizer(rowwise_quantizer=row, columnwise_quantizer=column, columnwise_source="rowwise_dequantized")


def mxfp8_fwd_high_precision_bwd_factory(role: Any) -> Any:
    """A forward in MXFP8, and a backward in high precision that reads its operands, decoded."""
    return _again(role, mxfp8_factory(role), IdentityQuantizer(), IdentityQuantizer(), mxfp8_factory(role))


def nvfp4_row_scaled_fwd_high_precision_bwd_factory(role: Any) -> Any:
    """The same with NVFP4, and a scale for each row of the input."""
    row = NVFP4Quantizer(row_scaled_nvfp4=getattr(role, "tensor_type", "") == "input")
    return _again(role, row, IdentityQuantizer(), IdentityQuantizer(), NVFP4Quantizer())


def nvfp4_row_scaled_fwd_mxfp8_bwd_factory(role: Any) -> Any:
    """MXFP8, but the forward of grouped layers is that of `nvfp4_row_scaled_fwd_high_precision_bwd_factory`."""
    if getattr(role, "module_type", "") != "grouped_linear":
        return mxfp8_factory(role)
    row = NVFP4Quantizer(row_scaled_nvfp4=role.tensor_type == "input")
    return _again(role, row, mxfp8_factory(role), mxfp8_factory(role), mxfp8_factory(role))


def nvfp4_1d_weight_factory(role: Any) -> Any:
    """NVFP4 with blocks of 16 for weights; dgrad multiplies the forward's weight, cast again."""
    weight = getattr(role, "tensor_type", "") == "weight"
    return _again(role, NVFP4Quantizer(), NVFP4Quantizer(), role, role) if weight else nvfp4_factory(role)


def mxfp8_fwd_nvfp4_bwd_factory(role: Any) -> Any:
    """A forward in MXFP8 and a backward in NVFP4; dgrad multiplies the forward's weight, cast again."""
    if getattr(role, "tensor_type", "") != "input":
        return _again(role, mxfp8_factory(role), NVFP4Quantizer(), nvfp4_factory(role), mxfp8_factory(role))
    return HybridQuantizer(rowwise_quantizer=mxfp8_factory(role), columnwise_quantizer=nvfp4_factory(role))


_TYPES = MappingProxyType({"forward": ("input", "weight", "output"), "backward": ("grad_output", "grad_input")})


class RecipeState:
    """Makes the quantizers of a recipe for a script that casts itself; ottava's layers have doors instead.

    Args:
        mode: "forward" or "backward".
        num_quantizers: number of slots: input, weight, output, input... or grad_output, grad_input...
        roles: says for each slot which tensor it is; None, or another tensor: as the slot's number says.
    Raises:
        ValueError: another number of roles.

    Example:
        >>> state = RecipeState.create(recipe.Float8BlockScaling(), mode="forward", num_quantizers=3)
        >>> [quantizer.block_scaling_dim for quantizer in state.make_quantizers()]
        [1, 2, 1]
    """

    scale: Tensor | None = None
    amax_history: Tensor | None = None
    """Of delayed scaling: fp32 (slots,), and (amax_history_len, slots); the quantizers have views of both."""
    _inner_delayed_scaling_recipe: recipe.DelayedScaling | None = None
    _has_delayed_scaling = property(lambda self: self.scale is not None)

    def __init__(
        self, recipe: Any, *, mode: str, num_quantizers: int = 1, device: Any = None, roles: Any = None
    ) -> None:
        if roles is not None and len(roles) != num_quantizers:
            raise ValueError(
                f"RecipeState requires roles to match num_quantizers: got {len(roles)} roles for {num_quantizers}"
            )
        self.recipe, self.mode, self.num_quantizers, self.roles = recipe, mode, num_quantizers, roles
        self.device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")

    @classmethod
    def create(cls, recipe: Any, **settings: Any) -> RecipeState:
        """The state of a recipe; the settings are those of the constructor."""
        return cls(recipe, **settings)

    def _slot_role(self, idx: int) -> recipe.QuantizerRole:
        return (self.roles[idx] if self.roles else None) or recipe.QuantizerRole()

    def _slot_tensor_type(self, idx: int) -> str:
        known, told = _TYPES[self.mode], self._slot_role(idx).tensor_type
        return told if told in (*_TYPES["forward"], *_TYPES["backward"]) else known[idx % len(known)]

    def make_quantizers(self) -> list[Any]:
        """A quantizer for each slot; requests of a factory share one history.

        Raises:
            ValueError: the factory gives None, or requests that differ.
        """
        slots = range(self.num_quantizers)
        if isinstance(self.recipe, recipe.DelayedScaling):
            made: list[Any] = [self.recipe] * len(slots)
        elif isinstance(self.recipe, recipe.CustomRecipe):
            made = [self.recipe.qfactory(self.roles[n] if self.roles else None) for n in slots]
            if None in made:
                raise ValueError(f"CustomRecipe qfactory returned None for slot {made.index(None)}; needs a quantizer")
        else:
            made = [self._make(self._slot_tensor_type(n), self._slot_role(n)) for n in slots]
        asked = [n for n, one in enumerate(made) if isinstance(one, recipe.DelayedScaling | DelayedScalingRequest)]
        if any(made[n] != made[asked[0]] for n in asked):
            raise ValueError(
                "All DelayedScalingRequests in one CustomRecipeState must match: give them the same fields"
            )
        if asked:
            one = made[asked[0]]
            self._inner_delayed_scaling_recipe = recipe.DelayedScaling(**vars(one)) if one is not self.recipe else one
            new: dict[str, Any] = {"dtype": torch.float32, "device": self.device}
            self.scale = torch.ones(len(asked), **new)
            self.amax_history = torch.zeros(one.amax_history_len, len(asked), **new)
            for place, n in enumerate(asked):
                amaxes = self.amax_history[0][place].view(1)
                made[n] = Float8Quantizer(self.scale[place], amaxes, get_fp8_te_dtype(one, self.mode == "forward"))
        return made

    def _make(self, tensor: str, role: recipe.QuantizerRole) -> Any:
        own, gradient, weight = self.recipe, tensor in _TYPES["backward"], tensor == "weight"
        if isinstance(own, recipe.NVFP4BlockScaling):
            params = getattr(own, "fp4_quant_" + ("bwd_grad" if gradient else "fwd_weight" if weight else "fwd_inp"))
            turned, four = params.random_hadamard_transform, not gradient and recipe.SCOPES[own.nvfp4_4over6](tensor)
            return NVFP4Quantizer(
                with_rht=turned,
                with_post_rht_amax=turned,
                with_2d_quantization=params.fp4_2d_quantization,
                stochastic_rounding=params.stochastic_rounding,
                row_scaled_nvfp4=self.mode == "forward" and not weight and own.row_scaled_activation,
                nvfp4_use_4over6=four,
                nvfp4_e4m3_max=256 if four and recipe.SCOPES[own.nvfp4_4over6_e4m3_use_256](tensor) else 448,
                nvfp4_4over6_err_mode=own.nvfp4_4over6_err_mode,
            )
        dtype = get_fp8_te_dtype(own, not gradient)
        if isinstance(own, recipe.Float8BlockScaling):
            dim = getattr(own, ("w" if weight else "grad" if gradient else "x") + "_block_scaling_dim")
            return Float8BlockQuantizer(dtype, force_pow_2_scales=not own.use_f32_scales, block_scaling_dim=dim)
        if isinstance(own, recipe.MXFP8BlockScaling):
            linear = role.module_type in ("linear", "grouped_linear") and role.tensor_type == "weight"
            return MXFP8Quantizer(dtype, with_2d_quantization=own.enable_2d_quantization and linear)
        return Float8CurrentScalingQuantizer(dtype, force_pow_2_scales=own.use_power_2_scales)


DelayedScalingRecipeState = Float8CurrentScalingRecipeState = Float8BlockScalingRecipeState = RecipeState
MXFP8BlockScalingRecipeState = NVFP4BlockScalingRecipeState = CustomRecipeState = RecipeState


def _default(own: recipe.Recipe, role: Any) -> Any:
    """The quantizer of a recipe for a role."""
    tensor = "input" if role is None or role.tensor_type == "grad_input" else role.tensor_type
    state = RecipeState(own, mode="backward" if tensor == "grad_output" else "forward")
    return state._make(tensor, role or recipe.QuantizerRole())


def current_scaling_factory(role: Any) -> Any:
    """The cells of Float8CurrentScaling()."""
    return _default(recipe.Float8CurrentScaling(), role)


def float8_block_scaling_factory(role: Any) -> Any:
    """The cells of Float8BlockScaling()."""
    return _default(recipe.Float8BlockScaling(), role)


def mxfp8_factory(role: Any) -> Any:
    """The cells of MXFP8BlockScaling()."""
    return _default(recipe.MXFP8BlockScaling(), role)


def nvfp4_factory(role: Any) -> Any:
    """The cells of NVFP4BlockScaling()."""
    return _default(recipe.NVFP4BlockScaling(), role)
