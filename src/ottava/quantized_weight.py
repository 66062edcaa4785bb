"""A parameter that is stored only as FP8 codes and scales: `QuantizedWeight`.

To autograd, optimizers, DDP, FSDP2 and state dicts it is a parameter of its outer dtype; in memory it is `codes` and
`scale_inv`. It supports the few operations that training needs: moving, copying, sharding, filling. It refuses all
others by name, so that nothing dequantizes a weight silently. Its door (`quantizer.WeightQuantizer`) hands the stored
codes to both GEMMs. `requantize_` stores new numbers, usually from an optimizer's master copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ottava.casts import dequantize, quantize
from ottava.quantized_tensor import Lent, QuantizationSpec, QuantizedTensor
from ottava.scaling import PER_TENSOR

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_Sizes = tuple[int, ...]


class QuantizedWeight(Tensor):
    """A weight (N, K), or a stack (G, N, K), that memory holds only as codes and scales.

    Args:
        codes: in spec.format.storage_dtype, contiguous; the shape of the weight.
        scale_inv: fp32, one entry a block: spec.granularity.grid_shape((N, K)), with G in front for a stack.
        spec: how it was cast; `stored_spec` of a recipe's cell.
        dtype: outer dtype, which other code and the gradient see: float32, bfloat16 or float16.
        requires_grad: as for any tensor.
        high_precision: the numbers before the cast, or None.
        matrix: the shape of the whole weight, if this one is a flat view.
    Raises:
        TypeError, ValueError: codes, scales or dtype do not fit.

    In-place operations that write new numbers cast them: `copy_` from a plain tensor, and the random fills of
    torch.nn.init. `w.copy_(w.dequantize())` changes no bit. Arithmetic raises TypeError.

    Example:
        >>> from ottava.formats import E4M3
        >>> weight = quantized_weight(torch.tensor([[0.5, -3.0], [14.0, 7.0]]), QuantizationSpec(E4M3))
        >>> weight.dtype, weight.codes.dtype, weight.dequantize()[1]
        (torch.float32, torch.float8_e4m3fn, tensor([14.,  7.]))
    """

    codes: Tensor
    scale_inv: Tensor
    spec: QuantizationSpec
    high_precision: Tensor | None
    """The numbers before the last cast, in the outer dtype and on the CPU; None: not kept (`drop_high_precision`)."""
    matrix: _Sizes
    group: dist.ProcessGroup | None
    """The ranks that hold the other shards of this weight, as FSDP2 tells them."""
    sent: bool
    """Whether all ranks of a DistributedDataParallel have its codes."""
    lent: Lent | None
    """The state of FSDP2's last gather; None: the weight owns its memory."""

    @staticmethod
    def __new__(
        cls: type[QuantizedWeight],
        codes: Tensor,
        scale_inv: Tensor,
        spec: QuantizationSpec,
        dtype: torch.dtype,
        *,
        requires_grad: bool = False,
        high_precision: Tensor | None = None,
        matrix: Sequence[int] | None = None,
        group: dist.ProcessGroup | None = None,
        sent: bool = False,
        lent: Lent | None = None,
    ) -> QuantizedWeight:
        _check(codes, scale_inv, spec, dtype, tuple(matrix or codes.shape))
        weight: QuantizedWeight = Tensor._make_wrapper_subclass(
            cls, codes.shape, dtype=dtype, device=codes.device, requires_grad=requires_grad
        )
        weight.codes, weight.scale_inv, weight.spec = codes, scale_inv, spec
        weight.high_precision, weight.matrix = high_precision, tuple(matrix or codes.shape)
        weight.group, weight.sent, weight.lent = group, sent, lent
        return weight

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # torch's own way

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch calls a classmethod
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        handler = _HANDLERS.get(str(func))
        if handler is None:
            weight = next((a for a in tree_leaves(args) if isinstance(a, QuantizedWeight)), None)
            raise NotImplementedError(
                f"{func}: {describe(weight)} takes no such operation: it is stored only as codes. Compute on "
                "weight.dequantize(), and store a result with weight.requantize_(values); an optimizer that steps it "
                "keeps a master copy, as ottava.optim.AdamW(master='fp32') does"
            )
        return handler(func, *args, **(kwargs or {}))

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """code * scale_inv in fp32, rounded once to `dtype` (its own by default), as a plain tensor.

        Gradients pass through it unchanged.
        """
        return _Dequantize.apply(self, dtype or self.dtype)  # type: ignore[no-any-return]

    @torch.no_grad()
    def requantize_(self, values: Tensor, *, amax: Tensor | None = None) -> None:
        """Casts new numbers into its storage, in place; its version moves on, so that nothing made of it stays in use.

        Codes are made of `values` rounded to the outer dtype: a BF16 weight with an fp32 master casts the same
        numbers, so training has the same bits with either. An fp32 weight is cast from fp32.

        Args:
            values: its shape, any float dtype.
            amax: fp32, one entry: the largest magnitude of the values in the outer dtype, where the caller knows it.
                Rows and blocks find their own. A smaller one saturates.
        Raises:
            ValueError: another shape.
        Edge cases: the shards of one weight under FSDP2 share the scale of a whole tensor, so there every rank has to
            call it (one all-reduce of a number).
        """
        if values.shape != self.shape:
            raise ValueError(f"requantize_: got {tuple(values.shape)} for {describe(self)}; needs {tuple(self.shape)}")
        values = values.detach().to(device=self.device, dtype=self.dtype)
        if not self.is_meta:
            rows = values.view(self.matrix)
            known = self._known_amax(rows, amax)
            for own, part in zip(self._matrices(), rows.unbind() if rows.dim() == 3 else (rows,), strict=True):
                cast = quantize(part, self.spec, scale=None if known is None else self.spec.scale_of(known).scale)
                own.data.copy_(cast.data)
                own.scale_inv.copy_(cast.scale_inv)
        if self.high_precision is not None:
            self.high_precision = _kept(values)
        torch.autograd.graph.increment_version(self)

    def drop_high_precision(self) -> None:
        """Frees the numbers before the cast; an optimizer calls it after it has made its master copy."""
        self.high_precision = None

    def share_memory_(self) -> QuantizedWeight:
        """Moves codes and scales into memory that processes share, as torch's."""
        self.codes.share_memory_(), self.scale_inv.share_memory_()
        return self

    def quantized(self) -> QuantizedTensor:
        """The matrix as operands are: its codes and scales, sharing memory.

        Raises:
            ValueError: it is a stack; take one with `weight[i]`.
        """
        if len(self.matrix) != 2:
            raise ValueError(f"quantized: got {describe(self)}; needs one matrix: weight[i]")
        return QuantizedTensor(self.codes.view(self.matrix), self.scale_inv, self.spec, self.dtype)

    def like(self, codes: Tensor, scale_inv: Tensor, **changes: Any) -> QuantizedWeight:
        """The same kind of weight with other codes and scales."""
        own = {"matrix": codes.shape, "group": self.group, "sent": self.sent, "dtype": self.dtype, "lent": self.lent}
        return QuantizedWeight(codes, scale_inv, self.spec, **(own | changes))

    def _matrices(self) -> list[QuantizedTensor]:
        if len(self.matrix) == 2:
            return [self.quantized()]
        pairs = zip(self.codes.view(self.matrix), self.scale_inv, strict=True)
        return [QuantizedTensor(codes, scale_inv, self.spec, self.dtype) for codes, scale_inv in pairs]

    def _known_amax(self, values: Tensor, amax: Tensor | None) -> Tensor | None:
        """The amax to scale a whole tensor by, (1, 1) fp32; None: each cast finds its own."""
        if self.spec.granularity != PER_TENSOR or values.dim() != 2:
            return None
        if self.group is None:
            return None if amax is None else amax.to(torch.float32).reshape(1, 1)
        own = values.abs().amax() if amax is None and values.numel() else values.new_zeros(()) if amax is None else amax
        shared = own.to(torch.float32).reshape(1, 1).clone()
        dist.all_reduce(shared, dist.ReduceOp.MAX, group=self.group)
        return shared

    @property
    def nbytes(self) -> int:  # type: ignore[override]  # an attribute of torch's
        """Bytes of codes and scales."""
        return self.codes.nbytes + self.scale_inv.nbytes

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: _Sizes, module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        """The tensors that FSDP2 gathers of each shard: codes and scales, as bytes, which every backend moves."""
        self.group = mesh.get_group()
        if outer_size[0] != (shards := mesh.size()) * self.shape[0]:
            raise ValueError(
                f"fully_shard: {tuple(outer_size)} on {shards} ranks leaves shards of different sizes, which a "
                f"weight stored as {self.spec} cannot have. Take a number of ranks that divides {outer_size[0]}"
            )
        scale_inv = (self.scale_inv if self.scales_shard else self.scale_inv[None]).contiguous()
        return (self.codes.view(torch.uint8), scale_inv), scale_inv

    def fsdp_post_all_gather(
        self, all_gather_outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        """The whole weight from the gathered tensors; it shares their memory."""
        if out is not None:  # it has this memory already
            return None
        data, *scales = all_gather_outputs
        codes, own = data.view(self.spec.format.storage_dtype), scales[0] if scales else metadata  # alone on one rank
        scale_inv = own if self.scales_shard else own[0]
        return self.like(codes, scale_inv, group=None, dtype=param_dtype, lent=Lent()), all_gather_outputs

    @property
    def scales_shard(self) -> bool:
        """Whether a piece of the first dimension has its own scales; False: a whole matrix has one."""
        return len(self.matrix) == 3 or self.spec.granularity.rows is not None

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale_inv"], (self.spec, self.dtype, self.matrix, self.requires_grad)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], said: Any, size: Any, stride: Any) -> QuantizedWeight:
        spec, dtype, matrix, grad = said
        return QuantizedWeight(inner["codes"], inner["scale_inv"], spec, dtype, requires_grad=grad, matrix=matrix)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"QuantizedWeight({tuple(self.shape)}, {self.spec}, {self.dtype}, device={str(self.device)!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedWeight:
        if id(self) in memo:
            return memo[id(self)]  # type: ignore[no-any-return]
        with torch.no_grad():
            copy = _as_it_was(_each(torch.ops.aten.clone.default, self), self)
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        said = self.spec.to_dict(), self.dtype, self.requires_grad, isinstance(self, nn.Parameter)
        codes = self.codes.view(torch.uint8)  # pickle knows no storage of float8
        return _rebuilt, (codes, self.scale_inv, *said, self.high_precision, self.matrix)


def is_quantized_weight(tensor: Any) -> TypeGuard[QuantizedWeight]:
    """Whether a tensor is stored only as FP8 codes and scales.

    Example:
        >>> is_quantized_weight(torch.ones(2, 2))
        False
    """
    return isinstance(tensor, QuantizedWeight)


def quantized_weight(
    values: Tensor, spec: QuantizationSpec, *, keep_high_precision: bool = False, requires_grad: bool = False
) -> QuantizedWeight:
    """A weight with these numbers, stored only as codes and scales.

    Args:
        values: (N, K), or (G, N, K) for a stack of matrices with scales of their own; any device, also meta.
        spec: of the weight's cell; its scale is always that of the numbers that are stored, see `stored_spec`.
        keep_high_precision: keep a copy of the numbers on the CPU, for the master copy of an optimizer.
    Raises:
        TypeError: dtype.  ValueError: neither a matrix nor a stack.
    """
    spec, values = stored_spec(spec), values.detach()
    if values.dim() not in (2, 3) or values.dtype not in _FLOATS:
        raise ValueError(
            f"quantized_weight: got {values.dtype} {tuple(values.shape)}; needs (N, K) or (G, N, K) in float32, "
            "bfloat16 or float16"
        )
    grid = (*values.shape[:-2], *spec.granularity.grid_shape((values.shape[-2], values.shape[-1])))
    codes = torch.empty(values.shape, dtype=spec.format.storage_dtype, device=values.device)
    scale_inv = torch.ones(grid, dtype=torch.float32, device=values.device)
    weight = QuantizedWeight(codes, scale_inv, spec, values.dtype)
    weight.requantize_(values)
    if keep_high_precision:
        weight.high_precision = _kept(values)
    return weight.requires_grad_(requires_grad)  # type: ignore[return-value]


def stored_spec(spec: QuantizationSpec) -> QuantizationSpec:
    """The spec to store a weight of that cell with: the amax of the numbers is known, so it predicts no scale.

    Example:
        >>> from ottava.formats import E4M3
        >>> str(stored_spec(QuantizationSpec(E4M3, scaling="delayed", amax_history_len=4)))
        'E4M3[tensor]'
    """
    return QuantizationSpec(spec.format, spec.granularity, spec.scale_format, margin=spec.margin)


class _Dequantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
        ctx.dtype = weight.dtype
        parts = [dequantize(part, dtype) for part in weight._matrices()]
        whole = torch.stack(parts) if len(weight.matrix) == 3 else parts[0]
        return whole.view(weight.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].to(ctx.dtype), None


def _check(codes: Tensor, scale_inv: Tensor, spec: QuantizationSpec, dtype: torch.dtype, matrix: _Sizes) -> None:
    if dtype not in _FLOATS:
        raise TypeError(f"QuantizedWeight: got outer dtype {dtype}; needs float32, bfloat16 or float16")
    if codes.dtype != spec.format.storage_dtype or scale_inv.dtype != torch.float32:
        raise TypeError(
            f"QuantizedWeight: got {codes.dtype} codes and {scale_inv.dtype} scales; {spec} has "
            f"{spec.format.storage_dtype} codes and float32 scales"
        )
    if len(matrix) not in (2, 3):
        raise ValueError(f"QuantizedWeight: got codes {matrix}; needs (N, K) or (G, N, K)")
    grid = (*matrix[:-2], *spec.granularity.grid_shape((matrix[-2], matrix[-1])))
    if tuple(scale_inv.shape) != grid:
        raise ValueError(f"QuantizedWeight: got scales {tuple(scale_inv.shape)} for codes {matrix}; {spec} has {grid}")


def _kept(values: Tensor) -> Tensor:
    return values.clone() if values.is_cpu or values.is_meta else values.cpu()


def _as_it_was(weight: QuantizedWeight, other: QuantizedWeight) -> QuantizedWeight:
    if isinstance(other, nn.Parameter):
        return nn.Parameter(weight, other.requires_grad)  # type: ignore[return-value]
    return weight.requires_grad_(other.requires_grad)  # type: ignore[return-value]


def _rebuilt(
    codes: Tensor, scale_inv: Tensor, spec: dict[str, Any], dtype: torch.dtype, requires_grad: bool, *rest: Any
) -> Any:
    (held, high_precision, matrix), own = rest, QuantizationSpec.from_dict(spec)
    codes = codes.view(own.format.storage_dtype)
    made = QuantizedWeight(codes, scale_inv, own, dtype, high_precision=high_precision, matrix=matrix)
    return nn.Parameter(made, requires_grad) if held else made.requires_grad_(requires_grad)


def describe(weight: QuantizedWeight | None) -> str:
    """For messages."""
    return "a QuantizedWeight" if weight is None else f"a weight {tuple(weight.shape)} stored as {weight.spec}"


# What follows is one function for each operation that is supported. func: the operation; the rest as torch calls it.


def _alias(func: Any, weight: QuantizedWeight, *_: Any, **__: Any) -> QuantizedWeight:
    return weight.like(weight.codes, weight.scale_inv, high_precision=weight.high_precision, matrix=weight.matrix)


def _view(func: Any, weight: QuantizedWeight, size: Sequence[int]) -> QuantizedWeight:
    codes = weight.codes.view(size)
    if tuple(codes.shape) not in (tuple(weight.shape), weight.matrix, (weight.numel(),)):
        raise NotImplementedError(f"{func}: {describe(weight)} cannot be seen as {tuple(codes.shape)}")
    return weight.like(codes, weight.scale_inv, high_precision=weight.high_precision, matrix=weight.matrix)


def _as_strided(func: Any, weight: QuantizedWeight, size: Any, stride: Any, offset: int = 0) -> QuantizedWeight:
    if tuple(size) != tuple(weight.shape) or tuple(stride) != weight.stride() or offset:
        raise NotImplementedError(f"{func}: {describe(weight)} has no other strides")
    return _alias(func, weight)


def _slice(
    func: Any, weight: QuantizedWeight, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> QuantizedWeight:
    first, last, _ = slice(start, end).indices(weight.shape[dim])
    if step == 1 and (first, last) == (0, weight.shape[dim]):
        return _alias(func, weight)
    own = weight.spec.granularity.rows
    rows = 1 if weight.dim() == 3 or own is None else own  # of a block
    if dim or step != 1 or weight.dim() == 1 or first % rows or (last % rows and last != weight.shape[0]):
        raise NotImplementedError(
            f"{func}: {describe(weight)} is divided along its first dimension, by whole blocks of {rows} rows; got "
            f"{first}:{last} of dimension {dim}. Fewer shards, or a recipe with smaller blocks, fit"
        )
    scale_inv = weight.scale_inv[first // rows : -(-last // rows)] if weight.scales_shard else weight.scale_inv
    return weight.like(weight.codes[first:last], scale_inv)


def _split(func: Any, weight: QuantizedWeight, size: Any, dim: int = 0) -> list[QuantizedWeight]:
    length = weight.shape[dim]
    sizes = [min(size, length - i) for i in range(0, length, size)] if isinstance(size, int) else list(size)
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [_slice(func, weight, dim, end - one, end) for one, end in zip(sizes, ends, strict=True)]


def _select(func: Any, weight: QuantizedWeight, dim: int, index: int) -> QuantizedWeight:
    if weight.dim() != 3 or dim:
        raise NotImplementedError(f"{func}: {describe(weight)} is no stack of matrices along dimension {dim}")
    return weight.like(weight.codes[index], weight.scale_inv[index])


def _unbind(func: Any, weight: QuantizedWeight, dim: int = 0) -> list[QuantizedWeight]:
    return [_select(func, weight, dim, index) for index in range(weight.shape[dim])]


def _each(func: Any, weight: QuantizedWeight, *args: Any, **settings: Any) -> QuantizedWeight:
    """The same operation on codes and scales: a copy, or another place."""
    dtype = settings.pop("dtype", None) or weight.dtype
    kept = None if weight.high_precision is None else weight.high_precision.to(dtype)
    codes, scale_inv = (func(part, *args, **settings) for part in (weight.codes, weight.scale_inv))
    return weight.like(codes, scale_inv, high_precision=kept, matrix=weight.matrix, dtype=dtype, lent=None)


def _new_zeros(func: Any, weight: QuantizedWeight, size: Sequence[int], **settings: Any) -> Tensor:
    """A QuantizedWeight for FSDP2, which asks for a weight with more or fewer rows; else a plain tensor."""
    if len(size) != weight.dim() or tuple(size[1:]) != tuple(weight.shape[1:]) or settings.get("dtype"):
        return _plain_like(func, weight, size, **settings)
    codes = func(weight.codes, size, **settings)
    grid = (*size[:-2], *weight.spec.granularity.grid_shape((size[-2], size[-1])))
    return weight.like(codes, torch.ones(grid, device=codes.device))


def _plain_like(func: Any, weight: QuantizedWeight, *args: Any, **settings: Any) -> Tensor:
    """Another tensor of that shape and dtype: a plain one."""
    model = torch.empty(1, dtype=weight.dtype, device=weight.device).expand(weight.shape)
    if settings.get("memory_format") in (None, torch.preserve_format):
        settings |= {"memory_format": torch.contiguous_format} if "_like" in str(func) else {}
    return func(model, *args, **settings)  # type: ignore[no-any-return]


def _copy_(func: Any, to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if not isinstance(to, QuantizedWeight):
        return to.copy_(source.dequantize(), non_blocking=non_blocking)
    if not isinstance(source, QuantizedWeight):
        values = source.to(device=to.device, dtype=to.dtype).expand(to.shape)
        if to.is_meta or not torch.equal(values, to.dequantize()):
            to.requantize_(values)
        elif to.high_precision is not None:  # they stand for these numbers already
            to.high_precision.copy_(values)
        return to
    if source.spec != to.spec or source.matrix != to.matrix:
        if source.high_precision is None:
            raise ValueError(
                f"copy_: got {describe(source)} for {describe(to)}: their numbers would be rounded twice. Give both "
                "models one recipe, or copy source.dequantize()"
            )
        to.requantize_(source.high_precision)
        return to
    to.codes.copy_(source.codes, non_blocking=non_blocking)
    to.scale_inv.copy_(source.scale_inv, non_blocking=non_blocking)
    to.high_precision = source.high_precision
    return to


def _fill_(func: Any, weight: QuantizedWeight, *args: Any, **settings: Any) -> QuantizedWeight:
    """New numbers, made in the outer dtype and then cast: how layers are initialized."""
    values = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
    weight.requantize_(func(values, *args, **settings))
    return weight


def _cat(func: Any, tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """A plain tensor, only for DistributedDataParallel, which sends it to ranks that have the codes already."""
    weight = next((t for t in tensors if isinstance(t, QuantizedWeight) and not t.sent), None)
    if weight is not None:
        raise NotImplementedError(
            f"{func}: {describe(weight)} would become a tensor of numbers, as in FullyShardedDataParallel. Shard with "
            "torch.distributed.fsdp.fully_shard, which gathers codes; or join weight.dequantize()"
        )
    return torch.cat([t.dequantize() if isinstance(t, QuantizedWeight) else t for t in tensors], dim)


def _is_pinned(func: Any, weight: QuantizedWeight, *args: Any) -> bool:
    return weight.codes.is_pinned() and weight.scale_inv.is_pinned()


def _broadcast_(func: Any, tensors: Sequence[QuantizedWeight], *args: Any) -> Any:
    work = None
    for part in (*(t.codes.view(torch.uint8) for t in tensors), *(t.scale_inv for t in tensors)):
        if work is not None:
            work.wait()
        _, work = func([part], *args)
    return tensors, work


_HANDLERS: MappingProxyType[str, Callable[..., Any]] = MappingProxyType(
    {f"aten.{name}": _alias for name in ("detach.default", "alias.default")}
    | {f"aten.{name}": _view for name in ("view.default", "_unsafe_view.default")}
    | {f"aten.{name}": _split for name in ("split.Tensor", "split_with_sizes.default")}
    | {f"aten.{name}.default": _each for name in ("clone", "_to_copy", "_pin_memory", "empty_like")}
    | {
        f"aten.{name}.default": _plain_like
        for name in ("zeros_like", "ones_like", "full_like", "rand_like", "new_empty")
    }
    | {f"aten.{name}.default": _plain_like for name in ("randn_like", "new_empty", "new_ones", "new_full")}
    | {f"aten.{name}": _fill_ for name in ("zero_.default", "fill_.Scalar", "uniform_.default", "normal_.default")}
    | {
        "aten.as_strided.default": _as_strided,
        "aten.cat.default": _cat,
        "aten.copy_.default": _copy_,
        "aten.is_pinned.default": _is_pinned,
        "aten.new_zeros.default": _new_zeros,
        "aten.select.int": _select,
        "aten.slice.Tensor": _slice,
        "aten.unbind.int": _unbind,
        "c10d.broadcast_.default": _broadcast_,
    }
)
"""What training needs of a weight: torch's operation -> how it is done."""
