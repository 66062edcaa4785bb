"""TransformerEngine's quantized tensors: a torch tensor that shows the shape and dtype of the original and holds codes.

Any operation of torch on one decodes it first; one in place casts the result again. ottava's own layers never make
them: `ottava.quantize` gives plain containers, in which nothing decodes silently. `rows` holds the codes of x and
`columns` those of x.T, in the layout of ottava. `_rowwise_data`, `_rowwise_scale_inv`, `_amax_rowwise` and the same of
columns have TransformerEngine's layout; what is written into them, by a collective for instance, counts from then on.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from enum import IntEnum
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ottava.kernels.gate import mapped
from ottava.kernels.scaled_mm import swizzled
from ottava.numerics import formats
from ottava.numerics.scaling import PER_ROW, TE_FOUR_OVER_SIX, amax, exponent_bytes, read_scales
from ottava.numerics.tensor import QuantizationSpec
from ottava.numerics.tensor import QuantizedTensor as Codes
from ottava.ops.quantize import quantize
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
MXFP8_BLOCK_SCALING_SIZE, NVFP4_BLOCK_SCALING_SIZE = 32, 16
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

    rows: Any = property(lambda self: self._held(False), lambda self, codes: self._put(False, codes))
    """Codes of x as a matrix (R, C), leading dimensions folded; a plain matrix where rows stay in high precision."""
    columns: Any = property(lambda self: self._held(True), lambda self, codes: self._put(True, codes))
    """Those of x.T, (C, R)."""
    _codes: list[Codes | Tensor | None]
    _shown: list[tuple[Tensor, Tensor] | None]
    """Codes and scales of each direction in TransformerEngine's layout, once somebody has asked for them."""
    high_precision: Tensor | None = None
    hybrid = False
    """Whether each direction has a quantizer of its own."""
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
        made._codes, made._shown, made._quantizer = [None, None], [None, None], quantizer
        made.rows, made.columns = rows, columns
        return made

    def _held(self, turned: bool) -> Codes | Tensor | None:
        """The codes of one direction; once a script has seen its buffers, those in the buffers."""
        codes, shown = self._codes[turned], self._shown[turned]
        return codes if shown is None or not isinstance(codes, Codes) else self._unlaid(codes, *shown, turned)

    def _put(self, turned: bool, codes: Codes | Tensor | None) -> None:
        self._codes[turned], self._shown[turned] = codes, None

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
        return mapped(lambda _: self.numbers(dtype), lambda dy: dy, self)  # type: ignore[no-any-return]

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
        matrix = matrix if self.rows is not None else matrix.t().contiguous()
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
        numbers, self._in_order = _plain(source), False
        asked = quantizer.get_usages() if self.hybrid else {}
        for turned, name in enumerate(("rowwise", "columnwise")):
            if self._held(bool(turned)) is None or not asked.get(name, True):
                continue
            shown, codes = self._shown[turned], _cast(quantizer, numbers, columns=bool(turned))
            self._put(bool(turned), codes)
            if shown is not None and isinstance(codes, Codes) and self._with_gemm_swizzled_scales:
                new = self._layout(codes, bool(turned))  # a kernel's graph has captured these addresses
                self._shown[turned] = shown[0].copy_(new[0]), shown[1].copy_(new[1])

    def is_cast_of(self, values: Tensor) -> Tensor:
        """Where its numbers are those that a cast of these values gives; an optimizer asks of its masters."""
        return self._quantizer.copy().quantize(values, dtype=self.dtype).numbers() == self.numbers()  # type: ignore[no-any-return]

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

    def prepare_for_saving(self) -> tuple[list[Tensor | None], QuantizedTensor]:
        """Its tensors, for an autograd function to save, and itself, empty until `restore_from_saved`."""
        parts: list[Tensor | None] = []
        for turned in (False, True):
            codes = self._held(turned)
            if isinstance(codes, Codes):
                parts += [codes.data.view(torch.uint8), codes.scale_inv]
                self._put(turned, replace(codes, data=codes.data[:0], scale_inv=codes.scale_inv[:0]))
            else:
                parts += [codes, None]
                self._put(turned, None)
        return parts, self

    def restore_from_saved(self, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Takes back what `prepare_for_saving` gave, and returns the rest of the list."""
        for turned in (False, True):
            codes, (data, scales) = self._codes[turned], tensors[2 * turned : 2 * turned + 2]
            if isinstance(codes, Codes) and data is not None and scales is not None:
                self._put(turned, replace(codes, data=data.view(codes.data.dtype), scale_inv=scales))
            else:
                self._put(turned, data)
        return list(tensors[4:])

    def get_metadata(self) -> dict[str, Any]:
        """The arguments of the constructor, but shape and dtype."""
        return {"rows": self.rows, "columns": self.columns, "quantizer": self._quantizer}

    def get_data_tensors(self) -> tuple[Tensor | None, ...]:
        """The buffers of its codes, without those of scales."""
        return tuple(self._laid(turned, 0) for turned in (False, True))

    def get_high_precision_init_val(self) -> Tensor | None:
        """The initial numbers of a weight, on the CPU; None: they were not kept, or are cleared."""
        return self.high_precision

    def clear_high_precision_init_val(self) -> None:
        """Gives up these numbers."""
        self.high_precision = None

    def clear(self) -> None:
        """Gives up the codes; `restore_from_saved` may give them back."""
        self.prepare_for_saving()

    @classmethod
    def make_like(cls, tensor: QuantizedTensor, *, shape: Sequence[int] | None = None, **others: Any) -> Any:
        """A tensor of the same codes, which are not copied; others: dtype, requires_grad."""
        own = {"dtype": others.pop("dtype", tensor.dtype)} | tensor.get_metadata() | others
        return cls.__new__(cls, tensor.shape if shape is None else shape, **own)

    def _like(self, shape: Sequence[int], rows: Any, columns: Any, dtype: torch.dtype | None = None) -> QuantizedTensor:
        return type(self).__new__(type(self), shape, dtype or self.dtype, rows, columns, self._quantizer)

    @property
    def _fp8_dtype(self) -> DType:
        held = self.rows if self.rows is not None else self.columns
        assert isinstance(held, Codes)
        return next(dtype for dtype, fmt in FORMATS.items() if fmt == held.spec.format)

    def _laid(self, turned: bool, part: int) -> Tensor | None:
        """Codes (part 0) or scales (1) of one direction in TransformerEngine's layout; None: there are none."""
        codes = self._codes[turned]
        if isinstance(codes, Codes) and self._shown[turned] is None:
            self._shown[turned] = self._layout(codes, turned)
        shown = self._shown[turned]
        return None if shown is None else shown[part]

    def _layout(self, codes: Codes, turned: bool) -> tuple[Tensor, Tensor]:
        """One scale a tensor: bytes in the shape of x or x.T, and the scale."""
        return self._shaped(codes.data.view(torch.uint8), turned), codes.scale_inv.reshape(-1)

    def _unlaid(self, codes: Codes, data: Tensor, scales: Tensor, turned: bool) -> Codes:
        """The inverse of `_layout`; here both are views of the codes."""
        return codes

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
    _in_order = False
    """Whether scales are in rows, although the quantizer asks for the order of tensor cores."""
    _with_gemm_swizzled_scales = property(
        lambda self: bool(getattr(self._quantizer, "optimize_for_gemm", False)) and not self._in_order
    )

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
            return _copied_into(first, args[1])
        if func is _aten._foreach_copy_.default:  # one rounding each, as copy_
            for to, source in zip(*args[:2], strict=True):
                to.copy_(source)
            return None
        schema = func._schema.arguments
        plain = [_unwrapped(arg) for arg in args]
        result = func(*plain, **{name: _unwrapped(value) for name, value in kwargs.items()})
        for argument, given, decoded in zip(schema, args, plain, strict=False):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            if isinstance(given, QuantizedTensor):
                return given.quantize_(decoded)
            for one, numbers in zip(given, decoded, strict=True) if isinstance(given, list | tuple) else ():
                if isinstance(one, QuantizedTensor):
                    one.quantize_(numbers)
        return result


def _kept(func: Any, x: QuantizedTensor, args: tuple[Any, ...], kwargs: Any) -> Any:
    """The result of an operation that keeps the codes; None: decode first."""
    packet = func.overloadpacket
    if packet in (_aten.detach, _aten.alias):
        return x._like(x.shape, x.rows, x.columns)
    if packet is _aten.as_strided and [*args[1][1:]] == [*x.shape[1:]] and [*args[2]] == [*x.stride()]:
        first, left = divmod((*args[3:], 0)[0] or 0, x.stride()[0])
        inside = not left and first + args[1][0] <= x.shape[0]
        return _part(x, 0, first, first + args[1][0]) if inside else None
    if packet is _aten.slice and (*args[4:], 1)[0] == 1:
        given = dict(enumerate(args))  # x, dim, start and end
        first, last, _ = slice(given.get(2), given.get(3)).indices(x.shape[given.get(1, 0)])
        return _part(x, given.get(1, 0), first, max(first, last))
    if packet is _aten.split:
        return _pieces(x, *args[1:])
    if packet in (_aten.new_zeros, _aten.empty_like):
        return _zeros(x, args[1] if packet is _aten.new_zeros else x.shape, kwargs)
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
    if (
        packet is _aten.index_select
        and args[1] == 0
        and x.dim() == 2
        and (taken := _taken(x.rows, args[2])) is not None
    ):
        return x._like((len(args[2]), x.shape[1]), taken, None)
    if packet is _aten._has_compatible_shallow_copy_type:
        return isinstance(args[1], QuantizedTensor)
    return None


def _part(x: QuantizedTensor, dim: int, first: int, last: int) -> QuantizedTensor | None:
    """Some rows (dim 0) or columns (1), with their scales; None: an end lies inside a block, or x is no matrix."""
    dim %= x.dim()
    shape = [*x.shape[:dim], last - first, *x.shape[dim + 1 :]]
    if shape == [*x.shape]:
        return x._like(shape, x.rows, x.columns)
    held = x._held(False), x._held(True)
    halves = [_cut(half, dim ^ turned, first, last) for turned, half in enumerate(held)] if x.dim() == 2 else held
    lost = any(half is None for half, whole in zip(halves, held, strict=True) if whole is not None)
    return None if lost or x.dim() != 2 else x._like(shape, *halves)


def _cut(half: Codes | Tensor | None, axis: int, first: int, last: int) -> Codes | Tensor | None:
    if isinstance(half, Codes):
        return half.part(axis, first, last)
    return None if half is None else half.narrow(axis, first, last - first)


def _pieces(x: QuantizedTensor, size: int, dim: int = 0) -> list[QuantizedTensor] | None:
    """`_part` for each piece; only a hybrid, which FSDP2 could not shard otherwise, refuses pieces of blocks."""
    pieces = [_part(x, dim, at, min(at + size, x.shape[dim])) for at in range(0, x.shape[dim], size)]
    if None in pieces and x.hybrid:
        raise NotImplementedError(
            f"HybridQuantizedTensor: pieces of {size} along dimension {dim} divide blocks of codes; needs a local "
            "shape that is divisible by 32 for MXFP8, by 16 for NVFP4, and by 128 for blocks: take fewer ranks"
        )
    return None if None in pieces else pieces  # type: ignore[return-value]  # none of them is None


def _zeros(x: QuantizedTensor, shape: Sequence[int], kwargs: Any) -> QuantizedTensor:
    """Zeros with the directions of x, in its kind of codes; a cast of its own, so no state of x moves.

    Raises:
        TypeError: codes cannot stand for that dtype.  RuntimeError: x has no codes.
    """
    held, dtype = (x._held(False), x._held(True)), kwargs.get("dtype") or x.dtype
    coded = any(isinstance(half, Codes) for half in held)
    if held == (None, None):
        raise RuntimeError(f"{type(x).__name__}.new_zeros needs at least one present sub-storage; x has no codes")
    if coded and dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"{type(x).__name__}.new_zeros only supports float32, bfloat16 and float16; got {dtype}")
    plain = torch.zeros(tuple(shape), dtype=dtype, device=kwargs.get("device") or x.device)
    matrix, quantizer = plain.reshape(-1, plain.shape[-1] if shape else 1), copy.copy(x._quantizer)
    halves: list[Any] = []
    for turned, half in enumerate(held):
        own: Any = matrix.t().contiguous() if turned else matrix
        if isinstance(half, Codes):
            own = replace(quantize(own, half.spec), amax=torch.zeros(1, device=own.device))
        halves.append(None if half is None else own)
    if quantizer is not None:
        quantizer.set_usage(rowwise=held[0] is not None, columnwise=held[1] is not None)
    return type(x).__new__(type(x), shape, dtype, halves[0], halves[1], quantizer)


def _copied_into(to: QuantizedTensor, source: Tensor) -> QuantizedTensor:
    """Takes the codes of a tensor of the same kind; casts the numbers of any other one.

    Raises:
        NotImplementedError: of two hybrids one lacks a direction.
    """
    if isinstance(source, QuantizedTensor) and type(source) is type(to) and source.shape == to.shape:
        pairs = [(to._held(turned), source._held(turned)) for turned in (False, True)]
        if to.hybrid and any((own is None) != (new is None) for own, new in pairs):
            raise NotImplementedError(
                f"copy_ requires matching rowwise/columnwise usages; got {source.get_usages()} for {to.get_usages()}: "
                "copy source.dequantize(), or set the usage of both quantizers"
            )
        if all(getattr(own, "spec", own is None) == getattr(new, "spec", new is None) for own, new in pairs):
            to.rows, to.columns = (_copied(new) for _, new in pairs)
            return to
    return to.quantize_(source)


def _taken(codes: Any, rows: Tensor) -> Any:
    """The codes of some rows, which have scales of their own or that of the tensor; None: blocks join rows."""
    if not isinstance(codes, Codes) or codes.spec.granularity.rows not in (None, 1):
        return None
    data = codes.data.view(torch.uint8).index_select(0, rows).view(codes.data.dtype)
    own = codes.spec.granularity.rows == 1
    return replace(codes, data=data, scale_inv=codes.scale_inv.index_select(0, rows) if own else codes.scale_inv)


def _copied(codes: Any) -> Any:
    if not isinstance(codes, Codes):
        return None if codes is None else codes.clone()
    return replace(codes, data=codes.data.clone(), scale_inv=codes.scale_inv.clone())


def prepare_for_saving(*tensors: Any) -> tuple[list[Tensor | None], list[Any]]:
    """The tensors in quantized and plain tensors, for `ctx.save_for_backward`, and what `restore_from_saved` needs.

    Example:
        >>> parts, objects = prepare_for_saving(torch.ones(1), None)
        >>> restore_from_saved(objects, parts)
        [tensor([1.]), None]
    """
    parts: list[Tensor | None] = []
    for tensor in tensors:
        parts += tensor.prepare_for_saving()[0] if isinstance(tensor, QuantizedTensor) else [tensor]
    return parts, [one if isinstance(one, QuantizedTensor) else None for one in tensors]


def restore_from_saved(
    objects: Sequence[Any], saved: Sequence[Tensor | None], return_saved_tensors: bool = False
) -> Any:
    """The tensors that `prepare_for_saving` got; with return_saved_tensors also what is left of the list."""
    left, found = list(saved), []
    for one in objects:
        if one is None:
            found.append(left.pop(0))
        else:
            left = one.restore_from_saved(left)
            found.append(one)
    return (found, left) if return_saved_tensors else found


def _plain(x: Tensor) -> Tensor:
    return x.numbers() if isinstance(x, QuantizedTensor) else x.detach()


def _unwrapped(value: Any) -> Any:
    if isinstance(value, QuantizedTensor):
        return value.numbers()
    return type(value)(map(_unwrapped, value)) if type(value) in (list, tuple) else value


def _rebuilt(cls: type[QuantizedTensor], *state: Any) -> QuantizedTensor:
    return cls.__new__(cls, *state)


class Float8Tensor(QuantizedTensor):
    """One scale a tensor."""

    @staticmethod
    def __new__(cls, shape: Sequence[int], dtype: torch.dtype, *parts: Any, **theirs: Any) -> Any:
        """As `QuantizedTensor`, or of TransformerEngine's data, data_transpose, fp8_scale_inv and fp8_dtype."""
        if parts or "data" not in theirs:
            return QuantizedTensor.__new__(cls, shape, dtype, *parts, **theirs)
        spec, width = QuantizationSpec(FORMATS[DType.cast(theirs["fp8_dtype"])]), shape[-1] if shape else 1
        halves: list[Codes | None] = []
        for name, sizes in (("data", (-1, width)), ("data_transpose", (width, -1))):
            given = theirs.get(name)
            data = None if given is None else given.reshape(sizes).view(spec.format.storage_dtype)
            scale = theirs["fp8_scale_inv"].reshape(1, 1)
            halves.append(None if data is None else Codes(data, scale.to(data.device), spec, dtype))
        last = theirs.get("quantizer"), theirs.get("requires_grad", False)
        return QuantizedTensor.__new__(cls, shape, dtype, halves[0], halves[1], *last)

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

    def _unlaid(self, codes: Codes, data: Tensor, scales: Tensor, turned: bool) -> Codes:
        flat = codes.spec.granularity.rows == 1
        kept = scales[:, : codes.scale_inv.shape[0 if flat else 1]]
        return replace(codes, scale_inv=kept.t() if flat else kept)


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

    def _unlaid(self, codes: Codes, data: Tensor, scales: Tensor, turned: bool) -> Codes:
        if self._with_gemm_swizzled_scales:
            return codes  # their order is for a kernel, which only reads
        rows, blocks = codes.scale_inv.shape
        exponents = (scales.t() if turned else scales)[:: codes.spec.granularity.rows or 1][:rows, :blocks]
        matrix = data.flatten(0, -2) if data.dim() > 2 else data
        stored = (matrix.t() if turned else matrix).contiguous().view(codes.data.dtype)
        return replace(codes, data=stored, scale_inv=read_scales(exponents.contiguous()))


class NVFP4Tensor(QuantizedTensor):
    """Blocks of 16 with E4M3 scales; one code a byte, two in `_rowwise_data`."""

    def _layout(self, codes: Codes, turned: bool) -> tuple[Tensor, Tensor]:
        """As checkpoints store NVFP4, the first code in the low bits."""
        made = LAYOUTS["modelopt-nvfp4"].tensors(codes, self._encode(codes).cpu())
        data, scales = (made[name].view(torch.uint8).to(codes.device) for name in ("weight", "weight_scale"))
        return self._shaped(data, turned), self._tiled(scales)

    def _unlaid(self, codes: Codes, data: Tensor, scales: Tensor, turned: bool) -> Codes:
        if self._with_gemm_swizzled_scales:
            return codes
        data = data.flatten(0, -2) if data.dim() > 2 else data
        every = codes.spec.granularity.rows or 1
        blocks = scales.view(torch.float8_e4m3fn)[: len(data) : every, : codes.scale_inv.shape[1]].float()
        scale_inv = torch.where(blocks > 0, blocks * self._encode(codes).reciprocal(), 1.0)
        return replace(codes, data=torch.stack((data & 15, data >> 4), -1).flatten(-2), scale_inv=scale_inv)

    def _encode(self, codes: Codes) -> Tensor:
        """The fp32 scale above those of the blocks, which quantizes."""
        assert codes.amax is not None  # `NVFP4Quantizer.cast` keeps it
        top = TE_FOUR_OVER_SIX.get(codes.spec.block_scale, (448.0, ""))[0] * formats.E2M1.max
        return torch.full_like(codes.amax, top).div_(codes.amax).clamp_(max=torch.finfo(torch.float32).max)

    def fsdp_pre_all_gather(
        self, mesh: Any, orig_size: Any, contiguous_orig_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, Tensor], tuple[Any, ...]]:
        """What FSDP2 gathers: codes, two a byte, and the scales of blocks; codes of columns are made of them.

        Raises:
            NotImplementedError: scales in the order of tensor cores.
            ValueError: what cannot be joined: no rows, columns with scales of their own, or parts of blocks; or ranks
                have different amaxes.
        """
        if self._with_gemm_swizzled_scales:
            raise NotImplementedError(
                "NVFP4Tensor: GEMM-swizzled scales cannot be joined; make it with quantizer.optimize_for_gemm=False"
            )
        rows, count = self.rows, self.numel() // self.shape[-1]
        squares = isinstance(rows, Codes) and rows.spec.granularity.transposes
        if rows is None or (self.columns is not None and not squares) or (squares and count % 16):
            raise ValueError(
                f"NVFP4Tensor: got a shard of {count} rows; needs rows in whole blocks of 16, and "
                "with_2d_quantization=True to make columns of them"
            )
        if rows.amax is not None:
            refuse_unlike(rows.amax, mesh, "amaxes", "NVFP4Tensor")
        data, scales = self._layout(rows, False)
        return (data, scales[:count]), (rows, self.columns is not None)

    def fsdp_post_all_gather(
        self, all_gather_outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> tuple[Any, Any]:
        """The whole tensor, or out with new codes; and what FSDP2 frees."""
        (data, scales), (shard, turned) = all_gather_outputs, metadata
        rows = self._unlaid(shard, data, scales, False)
        columns = replace(rows.t(), amax=shard.amax) if turned else None
        if out is not None:
            out.rows, out.columns = rows, columns
        made = out if out is not None else self._like(rows.shape, rows, columns, param_dtype)
        return made, all_gather_outputs

    _row_scaled_nvfp4 = property(lambda self: bool(getattr(self._quantizer, "row_scaled_nvfp4", False)))
    _nvfp4_use_4over6 = property(lambda self: bool(getattr(self._quantizer, "nvfp4_use_4over6", False)))
    _amax_rowwise = property(lambda self: None if self.rows is None else self.rows.amax.view(-1))
    _amax_columnwise = property(lambda self: None if self.columns is None else self.columns.amax.view(-1))


def refuse_unlike(number: Tensor, mesh: Any, what: str, where: str) -> None:
    """Refuses shards that ranks have cast by numbers of their own."""
    if mesh is None:
        return
    ends = torch.stack((number, -number))
    dist.all_reduce(ends, dist.ReduceOp.MAX, mesh.get_group())
    if not torch.equal(ends[0], -ends[1]):
        raise ValueError(f"{where}: ranks have different {what}; cast the whole tensor, then shard it")


class IdentityTensor(QuantizedTensor):
    """A tensor in high precision."""

    @property
    def _hp_data(self) -> Tensor | None:
        matrix = self.columns.t() if self.rows is None and self.columns is not None else self.rows
        return None if matrix is None else matrix.reshape(self.shape)


Float8TensorStorage, Float8BlockwiseQTensorStorage = Float8Tensor, Float8BlockwiseQTensor
MXFP8TensorStorage, NVFP4TensorStorage, IdentityTensorStorage = MXFP8Tensor, NVFP4Tensor, IdentityTensor


def _cast(quantizer: Any, x: Tensor, *, columns: bool) -> Codes | Tensor:
    matrix = x.reshape(-1, x.shape[-1] if x.dim() else 1)
    codes = quantizer.cast(matrix, columns=columns)
    if codes is not None:
        return codes  # type: ignore[no-any-return]
    return matrix.t().clone() if columns else matrix.clone()


def _quantize(quantizer: Any, dtype: torch.dtype, x: Tensor) -> QuantizedTensor:
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


def cast_rows_alone(matrix: Tensor, spec: QuantizationSpec) -> Codes:
    """The codes of each row as a tensor of its own, with the amax of each."""
    parts = [quantize(row.contiguous(), spec) for row in matrix.split(1)]
    data, scales = (torch.cat([getattr(part, name) for part in parts]) for name in ("data", "scale_inv"))
    return Codes(data, scales, spec, matrix.dtype, amax(parts[0].transformed(matrix), PER_ROW))


def quantized(quantizer: Any, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The quantized tensor of x: what `quantizer(x)` returns."""
    return mapped(partial(_quantize, quantizer, dtype or x.dtype), _unwrapped, x)  # type: ignore[no-any-return]


def get_fp8_te_dtype(fp8_recipe: Any, fprop_tensor: bool = True) -> DType:
    """The FP8 dtype of a recipe, forward or backward."""
    return TE_DType[get_fp8_torch_dtype(fp8_recipe, fprop_tensor)]


def get_fp8_torch_dtype(fp8_recipe: Any, fprop_tensor: bool = True) -> torch.dtype:
    """`get_fp8_te_dtype` as a dtype of torch."""
    maxima = fp8_recipe.fp8_format.value
    return torch.float8_e5m2 if maxima[0 if fprop_tensor else 1] > 448 else torch.float8_e4m3fn
