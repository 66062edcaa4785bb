"""TransformerEngine's quantized tensors: a torch tensor that shows the shape and dtype of the original and holds codes.

Any operation of torch on one decodes it first; one in place casts the result again. ottava's own layers never make
them: `ottava.quantize` gives plain containers, in which nothing decodes silently. `rows` holds the codes of x and
`columns` those of x.T, in the layout of ottava. `_rowwise_data`, `_rowwise_scale_inv`, `_amax_rowwise` and the same of
columns are copies in TransformerEngine's layout; new numbers are written by `quantize_`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import IntEnum
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from ottava.kernels.scaled_mm import swizzled
from ottava.numerics import formats
from ottava.numerics.scaling import TE_FOUR_OVER_SIX, amax, exponent_bytes
from ottava.numerics.tensor import QuantizationSpec
from ottava.numerics.tensor import QuantizedTensor as Codes
from ottava.ops.gemm import gemm
from ottava.weights.layouts import LAYOUTS

_aten = torch.ops.aten


class DType(IntEnum):
    """TransformerEngine's names of dtypes, with its numbers."""

    kByte = 0
    kInt16 = 1
    kInt32 = 2
    kInt64 = 3
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat8E8M0 = 9
    kFloat4E2M1 = 10

    @classmethod
    def cast(cls, value: Any) -> DType:
        """The member for a number, a member, or a dtype of torch.

        Raises:
            ValueError: there is none.
        """
        return TE_DType[value] if isinstance(value, torch.dtype) else cls(int(value))


_WIDE = torch.uint8, torch.int16, torch.int32, torch.int64, torch.float32, torch.float16, torch.bfloat16
TE_DType = MappingProxyType(dict(zip((*_WIDE, torch.float8_e4m3fn, torch.float8_e5m2), DType, strict=False)))
TE_DType_To_Torch = MappingProxyType({theirs: dtype for dtype, theirs in TE_DType.items()})
FORMATS = MappingProxyType(
    {DType.kFloat8E4M3: formats.E4M3, DType.kFloat8E5M2: formats.E5M2, DType.kFloat4E2M1: formats.E2M1}
)


class QuantizedTensorStorage:
    """The base class of what holds codes: quantized tensors, and a script's own containers."""


class QuantizedTensor(Tensor, QuantizedTensorStorage):
    """The base class of quantized tensors; `quantizer(x)` makes one.

    Example:
        >>> import ottava.compat.transformer_engine.pytorch as te
        >>> x = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3)(torch.tensor([1.0, 3.1]))
        >>> type(x).__name__, x.dtype, x.dequantize()
        ('Float8Tensor', torch.float32, tensor([0.9964, 3.1000]))
    """

    rows: Codes | Tensor | None
    """Codes of x as a matrix (R, C), leading dimensions folded; a plain matrix where rows stay in high precision."""
    columns: Codes | Tensor | None
    """Those of x.T, (C, R)."""
    _quantizer: Any
    """What casts new numbers into it; None: nothing does."""

    @staticmethod
    def __new__(
        cls,
        shape: Sequence[int],
        dtype: torch.dtype,
        rows: Codes | Tensor | None,
        columns: Codes | Tensor | None,
        quantizer: Any,
        requires_grad: bool = False,
    ) -> QuantizedTensor:
        """A tensor of these codes, which are not copied."""
        held = rows if rows is not None else columns
        if held is None:
            raise ValueError(f"{cls.__name__}: got no codes; needs rows or columns: set_usage(rowwise=True)")
        made: QuantizedTensor = Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=dtype, device=held.device, requires_grad=requires_grad
        )
        made.rows, made.columns, made._quantizer = rows, columns, quantizer
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # torch's takes tensor_contents
        return f"{type(self).__name__}({self._quantizer}, data={self.dequantize()})"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(
            f"{type(self).__name__}.{name} is not in ottava: .rows and .columns hold codes and scales, "
            "ottava.QuantizedTensor, in layouts of their own"
        )

    def dequantize(self, *, dtype: torch.dtype | None = None) -> Tensor:
        """The numbers of the codes; gradients pass through unchanged."""
        return _Dequantize.apply(self, dtype or self.dtype)  # type: ignore[no-any-return]

    def numbers(self, dtype: torch.dtype | None = None) -> Tensor:
        """The numbers of the codes, without a graph.

        Raises:
            NotImplementedError: there are only columns, of the turned tensor.
        """
        held = self.rows if self.rows is not None else self.columns
        if isinstance(held, Codes) and held.spec.transform is not None:
            raise NotImplementedError(
                f"{type(self).__name__}.dequantize of columns behind {held.spec.transform} is not in ottava: they are "
                "numbers of the turned tensor. Keep the rows, too: set_usage(rowwise=True)"
            )
        assert held is not None
        matrix = held.dequantize() if isinstance(held, Codes) else held.clone()
        matrix = matrix if self.rows is not None else matrix.t()
        return matrix.reshape(self.shape).to(dtype or self.dtype)

    def quantize_(self, tensor: Tensor, *, noop_flag: Tensor | None = None) -> QuantizedTensor:
        """Casts a tensor into this one.

        Raises:
            ValueError: it was made without a quantizer.
        """
        if self._quantizer is None:
            raise ValueError(f"{type(self).__name__}.quantize_: it has no quantizer; give quantizer= where it is made")
        return self._quantizer.update_quantized(tensor, self, noop_flag=noop_flag)  # type: ignore[no-any-return]

    def quantize_with(self, quantizer: Any, source: Tensor) -> None:
        """Takes the codes of a tensor of the same shape, with the directions that this tensor has."""
        if source.shape != self.shape:
            raise ValueError(
                f"{type(self).__name__}.quantize_: got {tuple(source.shape)}; needs {tuple(self.shape)}, as it has"
            )
        numbers = _plain(source)
        if self.rows is not None:
            self.rows = _cast(quantizer, numbers, columns=False)
        if self.columns is not None:
            self.columns = _cast(quantizer, numbers, columns=True)

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """Drops codes (False), or makes them of the other ones (True) where one scale serves both.

        Raises:
            RuntimeError: x itself is needed to make them.
        """
        for wanted, name, other in ((rowwise_usage, "rows", "columns"), (columnwise_usage, "columns", "rows")):
            held = getattr(self, other)
            if wanted and getattr(self, name) is None:
                if not isinstance(held, Codes) or not held.spec.granularity.transposes or held.spec.transform:
                    raise RuntimeError(
                        f"{type(self).__name__}: no {name} without the original tensor: make them at once, by "
                        "quantizer.set_usage(rowwise=True, columnwise=True)"
                    )
                setattr(self, name, held.t())
        if rowwise_usage is False:
            self.rows = None
        if columnwise_usage is False:
            self.columns = None

    def get_usages(self) -> dict[str, bool]:
        """Which codes there are."""
        return {"rowwise": self.rows is not None, "columnwise": self.columns is not None}

    def get_metadata(self) -> dict[str, Any]:
        """The arguments of the constructor, but shape and dtype."""
        return {"rows": self.rows, "columns": self.columns, "quantizer": self._quantizer}

    def _like(self, shape: Sequence[int], rows: Any, columns: Any, dtype: torch.dtype | None = None) -> QuantizedTensor:
        return type(self).__new__(type(self), shape, dtype or self.dtype, rows, columns, self._quantizer)

    @property
    def _fp8_dtype(self) -> DType:
        held = self.rows if self.rows is not None else self.columns
        assert isinstance(held, Codes)
        return next(dtype for dtype, fmt in FORMATS.items() if fmt == held.spec.format)

    def _laid(self, turned: bool, part: int) -> Tensor | None:
        """Codes (part 0) or scales (1) of one direction in TransformerEngine's layout; None: there are none."""
        codes = self.columns if turned else self.rows
        return self._layout(codes, turned)[part] if isinstance(codes, Codes) else None

    def _layout(self, codes: Codes, turned: bool) -> tuple[Tensor, Tensor]:
        """One scale a tensor: bytes in the shape of x or x.T, and the scale."""
        return self._shaped(codes.data.view(torch.uint8), turned), codes.scale_inv.reshape(-1)

    def _shaped(self, matrix: Tensor, turned: bool) -> Tensor:
        """A matrix as (..., C), or turned as (C, ...); C in bytes."""
        outer = (self.shape[-1:] + self.shape[:-1] if turned else self.shape)[:-1]
        return matrix.reshape(*outer, matrix.numel() // max(outer.numel(), 1)) if self.shape else matrix.view(())

    def _tiled(self, scales: Tensor) -> Tensor:
        """Bytes (R, blocks) padded by zeros to tiles of 128 x 4; in the order of tensor cores if that was asked for."""
        padded = nn.functional.pad(scales, (0, -scales.shape[1] % 4, 0, -scales.shape[0] % 128))
        return swizzled(scales).view(torch.uint8).view(padded.shape) if self._with_gemm_swizzled_scales else padded

    _rowwise_data = property(lambda self: self._laid(False, 0))
    _rowwise_scale_inv = property(lambda self: self._laid(False, 1))
    _columnwise_data = property(lambda self: self._laid(True, 0))
    _columnwise_scale_inv = property(lambda self: self._laid(True, 1))
    _with_gemm_swizzled_scales = property(lambda self: bool(getattr(self._quantizer, "optimize_for_gemm", False)))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        state = tuple(self.shape), self.dtype, self.rows, self.columns, self._quantizer, self.requires_grad
        return _rebuilt, (type(self), *state)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # torch calls a classmethod
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, QuantizedTensor) and (kept := _kept(func, first, args, kwargs)) is not None:
            return kept
        if func is _aten.copy_.default and isinstance(first, QuantizedTensor):
            first.quantize_(args[1])
            return first
        schema = func._schema.arguments
        plain = [_unwrapped(arg) for arg in args]
        result = func(*plain, **{name: _unwrapped(value) for name, value in kwargs.items()})
        for argument, given, decoded in zip(schema, args, plain, strict=False):
            if isinstance(given, QuantizedTensor) and argument.alias_info is not None and argument.alias_info.is_write:
                given.quantize_(decoded)
                return given
        return result


def _kept(func: Any, x: QuantizedTensor, args: tuple[Any, ...], kwargs: Any) -> Any:
    """The result of an operation that keeps the codes; None: decode first."""
    packet = func.overloadpacket
    if packet in (_aten.detach, _aten.alias):
        return x._like(x.shape, x.rows, x.columns)
    if packet is _aten.clone:
        return x._like(x.shape, _copied(x.rows), _copied(x.columns))
    if packet in (_aten.view, _aten._unsafe_view, _aten.reshape) and not isinstance(args[1], torch.dtype):
        shape = torch.empty(x.shape, device="meta").reshape(args[1]).shape
        if shape[-1:] == x.shape[-1:] or shape == x.shape:
            return x._like(shape, x.rows, x.columns)
    if packet is _aten._to_copy and set(kwargs) <= {"device", "non_blocking", "dtype", "layout", "pin_memory"}:
        same = kwargs.get("device") is None or torch.device(kwargs["device"]) == x.device
        if same and kwargs.get("dtype") not in (None, x.dtype):
            return x.numbers(kwargs["dtype"])  # of the codes, not of what they show
        if same:
            return x._like(x.shape, _copied(x.rows), _copied(x.columns))
    if packet is _aten._has_compatible_shallow_copy_type:
        return isinstance(args[1], QuantizedTensor)
    return None


def _copied(codes: Any) -> Any:
    if not isinstance(codes, Codes):
        return None if codes is None else codes.clone()
    return replace(codes, data=codes.data.clone(), scale_inv=codes.scale_inv.clone())


def _plain(x: Tensor) -> Tensor:
    return x.numbers() if isinstance(x, QuantizedTensor) else x.detach()


def _unwrapped(value: Any) -> Any:
    if isinstance(value, QuantizedTensor):
        return value.numbers()
    return type(value)(map(_unwrapped, value)) if type(value) in (list, tuple) else value


def _rebuilt(cls: type[QuantizedTensor], *state: Any) -> QuantizedTensor:
    return cls.__new__(cls, *state)


class _Dequantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: QuantizedTensor, dtype: torch.dtype) -> Tensor:
        return x.numbers(dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class Float8Tensor(QuantizedTensor):
    """One scale a tensor."""

    @staticmethod
    def __new__(cls, shape: Sequence[int], dtype: torch.dtype, *parts: Any, **theirs: Any) -> Any:
        """As `QuantizedTensor`, or of TransformerEngine's data, fp8_scale_inv and fp8_dtype."""
        if parts or "data" not in theirs:
            return QuantizedTensor.__new__(cls, shape, dtype, *parts, **theirs)
        spec = QuantizationSpec(FORMATS[DType.cast(theirs["fp8_dtype"])])
        data = theirs["data"].reshape(-1, shape[-1] if shape else 1).view(spec.format.storage_dtype)
        rows = Codes(data, theirs["fp8_scale_inv"].reshape(1, 1).to(data.device), spec, dtype)
        last = theirs.get("quantizer"), theirs.get("requires_grad", False)
        return QuantizedTensor.__new__(cls, shape, dtype, rows, None, *last)

    _data, _transpose = QuantizedTensor._rowwise_data, QuantizedTensor._columnwise_data
    _transpose_invalid = property(lambda self: self.columns is None)

    @property
    def _scale_inv(self) -> Tensor:
        held = self.rows if self.rows is not None else self.columns
        assert isinstance(held, Codes)
        return held.scale_inv.view(1)


class Float8BlockwiseQTensor(QuantizedTensor):
    """Blocks of 1x128 or 128x128."""

    _is_2D_scaled = property(lambda self: getattr(self._quantizer, "block_scaling_dim", 1) == 2)

    def _layout(self, codes: Codes, turned: bool) -> tuple[Tensor, Tensor]:
        """Scales of 1x128 stand transposed; the last dimension is padded to fours."""
        scales = codes.scale_inv.t() if codes.spec.granularity.rows == 1 else codes.scale_inv
        return super()._layout(codes, turned)[0], nn.functional.pad(scales, (0, -scales.shape[1] % 4)).contiguous()


class MXFP8Tensor(QuantizedTensor):
    """Blocks of 32 with E8M0 scales."""

    def _layout(self, codes: Codes, turned: bool) -> tuple[Tensor, Tensor]:
        """Columns stand as x does, not turned. A block of zeros has the byte 0, here the scale 1."""
        magnitudes = codes.data.view(torch.uint8) & 127
        used = amax(magnitudes.float(), codes.spec.granularity) > 0
        scales = torch.where(used, exponent_bytes(codes.scale_inv), 0)
        scales = self._tiled(scales.repeat_interleave(codes.spec.granularity.rows or 1, 0)[: codes.shape[0]])
        data = codes.data.view(torch.uint8)
        if not turned:
            return self._shaped(data, False), scales
        back = scales.view(scales.shape[::-1]) if self._with_gemm_swizzled_scales else scales.t().contiguous()
        return self._shaped(data.t(), False), back


class NVFP4Tensor(QuantizedTensor):
    """Blocks of 16 with E4M3 scales; one code a byte, two in `_rowwise_data`."""

    def _layout(self, codes: Codes, turned: bool) -> tuple[Tensor, Tensor]:
        """As checkpoints store NVFP4, the first code in the low bits."""
        assert codes.amax is not None  # `NVFP4Quantizer.cast` keeps it
        top = TE_FOUR_OVER_SIX.get(codes.spec.block_scale, (448.0, ""))[0] * formats.E2M1.max
        encode = torch.full_like(codes.amax, top).div_(codes.amax).clamp_(max=torch.finfo(torch.float32).max)
        made = LAYOUTS["modelopt-nvfp4"].tensors(codes, encode.cpu())
        data, scales = (made[name].view(torch.uint8).to(codes.device) for name in ("weight", "weight_scale"))
        return self._shaped(data, turned), self._tiled(scales)

    _row_scaled_nvfp4 = property(lambda self: bool(getattr(self._quantizer, "row_scaled_nvfp4", False)))
    _nvfp4_use_4over6 = property(lambda self: bool(getattr(self._quantizer, "nvfp4_use_4over6", False)))
    _amax_rowwise = property(lambda self: None if self.rows is None else self.rows.amax.view(-1))
    _amax_columnwise = property(lambda self: None if self.columns is None else self.columns.amax.view(-1))


class IdentityTensor(QuantizedTensor):
    """A tensor in high precision."""

    _hp_data = property(lambda self: None if self.rows is None else self.rows.view(self.shape))


class HybridQuantizedTensor(QuantizedTensor):
    """Rows and columns by different quantizers."""

    _rowwise_storage = rowwise_sub_storage = property(lambda self: self._half(False))
    _columnwise_storage = columnwise_sub_storage = property(lambda self: self._half(True))

    def _half(self, turned: bool) -> Any:
        """One direction, as a tensor of its own quantizer; None: it was not made."""
        rows, columns = (None, self.columns) if turned else (self.rows, None)
        own = self._quantizer.columnwise_quantizer if turned else self._quantizer.rowwise_quantizer
        held = rows is not None or columns is not None
        return own.tensor_class(self.shape, self.dtype, rows, columns, own) if held else None


Float8TensorStorage, Float8BlockwiseQTensorStorage = Float8Tensor, Float8BlockwiseQTensor
MXFP8TensorStorage, NVFP4TensorStorage, IdentityTensorStorage = MXFP8Tensor, NVFP4Tensor, IdentityTensor
HybridQuantizedTensorStorage = HybridQuantizedTensor


def _cast(quantizer: Any, x: Tensor, *, columns: bool) -> Codes | Tensor:
    matrix = x.reshape(-1, x.shape[-1] if x.dim() else 1)
    codes = quantizer.cast(matrix, columns=columns)
    if codes is not None:
        return codes  # type: ignore[no-any-return]
    return matrix.t().clone() if columns else matrix.clone()


class _Quantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, quantizer: Any, dtype: torch.dtype) -> QuantizedTensor:
        usages = quantizer.get_usages()
        kind = quantizer.tensor_class
        numbers = _plain(x)
        rows, columns = (
            _cast(quantizer, numbers, columns=turned) if usages[name] else None
            for name, turned in (("rowwise", False), ("columnwise", True))
        )
        if not isinstance(numbers, Tensor) or numbers.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise TypeError(f"{type(quantizer).__name__}: got {numbers.dtype}; needs float32, bfloat16 or float16")
        return kind.__new__(kind, x.shape, dtype, rows, columns, quantizer)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _unwrapped(grad), None, None


def quantized(quantizer: Any, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The quantized tensor of x: what `quantizer(x)` returns."""
    return _Quantize.apply(x, quantizer, dtype or x.dtype)  # type: ignore[no-any-return]


def general_gemm(
    A: Tensor,
    B: Tensor,
    out_dtype: torch.dtype | None = None,
    *,
    layout: str = "TN",
    bias: Tensor | None = None,
    grad: bool = False,
    accumulate: bool = False,
    out: Tensor | None = None,
    alpha: float = 1.0,
    use_split_accumulator: bool = False,
    quantization_params: Any = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None, None, None]:
    """TransformerEngine's GEMM: B A.T ("TN"), B A ("NN") or B.T A ("NT"), of two quantized or two plain tensors.

    Args:
        A, B: tensors; leading dimensions are folded. Quantized ones need the codes of the dimension that is summed.
        bias: added to the result; with grad, its gradient is returned in the second place.
        accumulate, out: add to out, which is returned.
        quantization_params: cast the result.
    Raises:
        NotImplementedError: gelu, user buffers or another argument.  ValueError: unknown layout, or codes are missing.

    Example:
        >>> general_gemm(torch.ones(2, 16), torch.ones(3, 16))[0].shape
        torch.Size([3, 2])
    """
    if layout not in ("TN", "NN", "NT"):
        raise ValueError(f"general_gemm: got layout {layout!r}; needs 'TN', 'NN' or 'NT'")
    for name, value in others.items():
        if value not in (None, False):
            raise NotImplementedError(f"general_gemm: {name}={value!r} is not in ottava: leave it out")
    a, b = _operand(A, "A", columns=layout[0] == "N"), _operand(B, "B", columns=layout[1] == "T")
    dtype = out_dtype or (out.dtype if out is not None else A.dtype)
    wide = accumulate or alpha != 1.0
    y = gemm(
        b,
        a,
        out_dtype=torch.float32 if wide else dtype,
        bias=None if grad else bias,
        fast_accum=isinstance(a, Codes) and not use_split_accumulator,
    )
    y = (alpha * y) if alpha != 1.0 else y
    folded = B.shape[:-1] if layout != "NT" else B.shape[-1:]
    y = y.reshape(*folded, y.shape[-1])
    if accumulate and out is not None:
        y = out.float() + y
    y = y.to(dtype)
    y = y if out is None else out.copy_(y)
    d_bias = _plain(B).reshape(-1, B.shape[-1]).sum(0).to(dtype) if grad and bias is not None else None
    return (y if quantization_params is None else quantization_params(y)), d_bias, None, None


def general_grouped_gemm(
    A: Sequence[Tensor],
    B: Sequence[Tensor],
    out: Sequence[Tensor],
    quantization_params: Sequence[Any],
    out_dtype: torch.dtype | None = None,
    layout: str = "TN",
    m_splits: Sequence[int] | None = None,
    **others: Any,
) -> tuple[Any, list[Any], list[Any]]:
    """`general_gemm` of each pair, written into out.

    Args:
        out: a tensor for each pair; with single_output one, whose rows m_splits divides.
        others: bias (a list, counts with use_bias), and arguments of `general_gemm`.
    Returns:
        out, or its one tensor; the gradients of the biases; a third list, for GELU's inputs.

    Example:
        >>> x, w, y = torch.ones(3, 16), torch.ones(2, 4, 16), torch.empty(3, 4)
        >>> general_grouped_gemm(list(w), x.split([2, 1]), [y], [None] * 2, m_splits=[2, 1], single_output=True)[0][0]
        tensor([16., 16., 16., 16.])
    """
    biases = others.pop("bias", None) if others.pop("use_bias", False) else [None] * len(A)
    one_tensor = others.pop("single_output", False)
    places = out[0].split(list(m_splits or ())) if one_tensor else out
    made = [
        general_gemm(a, b, layout=layout, bias=bias, out=place, quantization_params=cast, **others)
        for a, b, bias, place, cast in zip(A, B, biases, places, quantization_params, strict=True)
    ]
    return out[0] if one_tensor else out, [one[1] for one in made], [None] * len(A)


def _operand(x: Tensor, name: str, *, columns: bool) -> Any:
    if not isinstance(x, QuantizedTensor):
        matrix = x.reshape(-1, x.shape[-1])
        return matrix.t().contiguous() if columns else matrix
    codes = x.columns if columns else x.rows
    if codes is None:
        word = "columnwise" if columns else "rowwise"
        raise ValueError(f"general_gemm: {name} has no {word} codes; needs quantizer.set_usage({word}=True)")
    return codes


def get_fp8_te_dtype(fp8_recipe: Any, fprop_tensor: bool = True) -> DType:
    """The FP8 dtype of a recipe, forward or backward."""
    return TE_DType[get_fp8_torch_dtype(fp8_recipe, fprop_tensor)]


def get_fp8_torch_dtype(fp8_recipe: Any, fprop_tensor: bool = True) -> torch.dtype:
    """`get_fp8_te_dtype` as a dtype of torch."""
    maxima = fp8_recipe.fp8_format.value
    return torch.float8_e5m2 if maxima[0 if fprop_tensor else 1] > 448 else torch.float8_e4m3fn
