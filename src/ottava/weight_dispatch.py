"""What torch's operations do to a weight that is stored only as codes (`quantized_weight.QuantizedWeight`).

One function for each operation that training needs: to hold, view, move, copy, cut and fill a parameter. Questions
about its numbers (norms, extremes, comparisons) are asked of the dequantized numbers. No other operation computes.
func: the operation; the rest as torch calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ottava.quantized_tensor import Lent, QuantizationSpec
from ottava.weight_storage import store_scales

_Sizes = tuple[int, ...]


class Coded(Tensor):
    """The base of `QuantizedWeight`: what these operations know of it."""

    codes: Tensor
    scales: Tensor
    spec: QuantizationSpec
    kept: list[Tensor | None]
    """`high_precision`, in one place for a weight and its views, so that a write through `.data` reaches the weight."""
    matrix: _Sizes
    group: dist.ProcessGroup | None
    """The ranks that hold the other shards of this weight, as FSDP2 tells them."""
    sent: bool
    """Whether all ranks of a DistributedDataParallel have its codes."""
    lent: Lent | None
    """The state of FSDP2's last gather; None: the weight owns its memory."""
    uniform: tuple[Any, Any] | None = None
    """The arguments of `uniform_`, if that was the last write."""

    @property
    def high_precision(self) -> Tensor | None:
        """The numbers before the last cast, in the outer dtype, on the CPU; None: not kept (`drop_high_precision`)."""
        return self.kept[0]

    @high_precision.setter
    def high_precision(self, numbers: Tensor | None) -> None:
        self.kept[0] = numbers

    @property
    def scales_shard(self) -> bool:
        """Whether a piece of the first dimension has its own scales; False: a whole matrix has one."""
        return len(self.matrix) == 3 or self.spec.granularity.rows is not None

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The numbers, as a plain tensor."""
        raise NotImplementedError

    def requantize_(self, values: Tensor, *, amax: Tensor | None = None) -> None:
        """Takes new numbers."""
        raise NotImplementedError

    def like(self, codes: Tensor, scales: Tensor, **changes: Any) -> Coded:
        """The same kind of weight with other codes and scales."""
        raise NotImplementedError

    def was_written(self) -> None:
        """Moves on the versions of the weight and of its codes; the latter is one for all views. Optimizers ask."""
        torch.autograd.graph.increment_version((self, self.codes))
        self.uniform = None


def describe(weight: Coded | None) -> str:
    """For messages."""
    return "a QuantizedWeight" if weight is None else f"a weight {tuple(weight.shape)} stored as {weight.spec}"


def refuse(func: Any, *args: Any, **settings: Any) -> Any:
    """Any other operation.

    Raises:
        NotImplementedError: always.
    """
    weight = next((a for a in tree_leaves((args, settings)) if isinstance(a, Coded)), None)
    raise NotImplementedError(
        f"{func}: {describe(weight)} takes no such operation: it is stored only as codes. Compute on "
        "weight.dequantize(), and store a result with weight.requantize_(values); an optimizer that steps it "
        "keeps a master copy, as ottava.optim.AdamW(master='fp32') does"
    )


def _alias(func: Any, weight: Coded, *_: Any, **__: Any) -> Coded:
    return weight.like(weight.codes, weight.scales, kept=weight.kept, matrix=weight.matrix)


def _view(func: Any, weight: Coded, size: Sequence[int]) -> Coded:
    codes = weight.codes.view(size)
    if tuple(codes.shape) not in (tuple(weight.shape), weight.matrix, (weight.numel(),)):
        raise NotImplementedError(f"{func}: {describe(weight)} cannot be seen as {tuple(codes.shape)}")
    return weight.like(codes, weight.scales, kept=weight.kept, matrix=weight.matrix)


def _as_strided(func: Any, weight: Coded, size: Any, stride: Any, offset: int = 0) -> Coded:
    if tuple(size) != tuple(weight.shape) or tuple(stride) != weight.stride() or offset:
        raise NotImplementedError(f"{func}: {describe(weight)} has no other strides")
    return _alias(func, weight)


def _slice(
    func: Any, weight: Coded, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Coded:
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
    scales = weight.scales[first // rows : -(-last // rows)] if weight.scales_shard else weight.scales
    return weight.like(weight.codes[first:last], scales)


def _split(func: Any, weight: Coded, size: Any, dim: int = 0) -> list[Coded]:
    length = weight.shape[dim]
    sizes = [min(size, length - i) for i in range(0, length, size)] if isinstance(size, int) else list(size)
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [_slice(func, weight, dim, end - one, end) for one, end in zip(sizes, ends, strict=True)]


def _select(func: Any, weight: Coded, dim: int, index: int) -> Coded:
    if weight.dim() != 3 or dim:
        raise NotImplementedError(
            f"{func}: {describe(weight)} is no stack of matrices along dimension {dim}; "
            "weight.dequantize() gives its numbers"
        )
    return weight.like(weight.codes[index], weight.scales[index])


def _unbind(func: Any, weight: Coded, dim: int = 0) -> list[Coded]:
    return [_select(func, weight, dim, index) for index in range(weight.shape[dim])]


def each_part(func: Any, weight: Coded, *args: Any, **settings: Any) -> Coded:
    """The same operation on codes and scales: a copy, or another place."""
    dtype = settings.pop("dtype", None) or weight.dtype
    kept = None if weight.high_precision is None else weight.high_precision.to(dtype, copy=True)
    codes, scales = (func(part, *args, **settings) for part in (weight.codes, weight.scales))
    return weight.like(codes, scales, high_precision=kept, matrix=weight.matrix, dtype=dtype, lent=None)


def _new_zeros(func: Any, weight: Coded, size: Sequence[int], **settings: Any) -> Tensor:
    """A QuantizedWeight for FSDP2, which asks for a weight with more or fewer rows; else a plain tensor."""
    if len(size) != weight.dim() or tuple(size[1:]) != tuple(weight.shape[1:]) or settings.get("dtype"):
        return _plain_like(func, weight, size, **settings)
    codes = func(weight.codes, size, **settings)
    grid = (*size[:-2], *weight.spec.granularity.grid_shape((size[-2], size[-1])))
    return weight.like(codes, store_scales(torch.ones(grid, device=codes.device, dtype=torch.float32), weight.spec))


def _plain_like(func: Any, weight: Coded, *args: Any, **settings: Any) -> Tensor:
    """Another tensor of that shape and dtype: a plain one."""
    model = torch.empty(1, dtype=weight.dtype, device=weight.device).expand(weight.shape)
    if settings.get("memory_format") in (None, torch.preserve_format):
        settings |= {"memory_format": torch.contiguous_format} if "_like" in str(func) else {}
    return func(model, *args, **settings)  # type: ignore[no-any-return]


def _copy_(func: Any, to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if not isinstance(to, Coded):
        return to.copy_(source.dequantize(), non_blocking=non_blocking)
    if not isinstance(source, Coded):
        values = source.to(device=to.device, dtype=to.dtype).expand(to.shape)
        if to.is_meta or not torch.equal(values, to.dequantize()):
            to.requantize_(values)
        elif to.high_precision is not None:  # they stand for these numbers already
            to.high_precision.copy_(values.view(to.matrix))
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
    to.scales.copy_(source.scales, non_blocking=non_blocking)
    to.was_written()
    to.high_precision = None if source.high_precision is None else source.high_precision.clone()
    return to


def _fill_(func: Any, weight: Coded, *args: Any, **settings: Any) -> Coded:
    """New numbers, made in the outer dtype and then cast: how layers are initialized."""
    values = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
    weight.requantize_(func(values, *args, **settings))
    weight.uniform = (args, settings) if "uniform_" in str(func) else None
    return weight


def _erfinv_(func: Any, weight: Coded) -> Coded:
    """trunc_normal_ before torch 2.13: of uniform numbers, drawn anew in FP32, because codes of them have no tails."""
    if weight.uniform is None:
        return refuse(func, weight)  # type: ignore[no-any-return]
    args, settings = weight.uniform
    weight.requantize_(func(torch.empty(weight.shape, device=weight.device).uniform_(*args, **settings)))
    return weight


def _change_(func: Any, weight: Coded, *args: Any, **settings: Any) -> Coded:
    """Its numbers, changed by numbers: by tensors only an optimizer changes them, which needs a master."""
    mask = args[:1] if "masked_fill_" in str(func) else ()
    if any(isinstance(one, Tensor) and one.dim() for one in args[len(mask) :]):
        return refuse(func, weight, *args)  # type: ignore[no-any-return]
    kept = weight.high_precision
    values = weight.dequantize() if kept is None else kept.to(weight.device, copy=True).view(weight.shape)
    weight.requantize_(func(values, *args, **settings))
    return weight


def _eye(func: Any, *size: int, out: Coded, **settings: Any) -> Coded:
    out.requantize_(torch.eye(*size, device=out.device))
    return out


def _asked(func: Any, *args: Any, **settings: Any) -> Any:
    """A question about the numbers."""
    plain = tree_map(lambda one: one.dequantize() if isinstance(one, Coded) else one, (args, settings))
    return func(*plain[0], **plain[1])


def _cat(func: Any, tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """A plain tensor, for parameters_to_vector, and for DistributedDataParallel's ranks, which have the codes already.

    FullyShardedDataParallel would keep nothing else; it joins detached tensors, and the former views of parameters.
    """
    own = (t for t in tensors if isinstance(t, Coded) and not t.sent)
    weight = next((t for t in own if not isinstance(t._base, torch.nn.Parameter)), None)
    if weight is not None:
        raise NotImplementedError(
            f"{func}: {describe(weight)} would become a tensor of numbers, as in FullyShardedDataParallel. Shard with "
            "torch.distributed.fsdp.fully_shard, which gathers codes; or join weight.dequantize()"
        )
    return torch.cat([t.dequantize() if isinstance(t, Coded) else t for t in tensors], dim)


def _is_pinned(func: Any, weight: Coded, *args: Any) -> bool:
    return weight.codes.is_pinned() and weight.scales.is_pinned()


def _broadcast_(func: Any, tensors: Sequence[Coded], *args: Any) -> Any:
    work = None
    for part in (*(t.codes.view(torch.uint8) for t in tensors), *(t.scales for t in tensors)):
        if work is not None:
            work.wait()
        _, work = func([part], *args)
    for weight in tensors:
        weight.was_written()
    return tensors, work


OPERATIONS: MappingProxyType[str, Callable[..., Any]] = MappingProxyType(
    {f"aten.{name}": _alias for name in ("detach.default", "alias.default")}
    | {f"aten.{name}": _view for name in ("view.default", "_unsafe_view.default")}
    | {f"aten.{name}": _split for name in ("split.Tensor", "split_with_sizes.default")}
    | {f"aten.{name}.default": each_part for name in ("clone", "_to_copy", "_pin_memory", "empty_like")}
    | {
        f"aten.{name}.default": _plain_like
        for name in ("zeros_like", "ones_like", "full_like", "rand_like", "new_empty")
    }
    | {f"aten.{name}.default": _plain_like for name in ("randn_like", "new_empty", "new_ones", "new_full")}
    | {f"aten.{name}": _fill_ for name in ("zero_.default", "fill_.Scalar", "uniform_.default", "normal_.default")}
    | {f"aten.{name}": _change_ for name in ("mul_.Tensor", "mul_.Scalar", "div_.Tensor", "div_.Scalar", "add_.Tensor")}
    | {f"aten.{name}": _change_ for name in ("add_.Scalar", "sub_.Tensor", "sub_.Scalar", "masked_fill_.Scalar")}
    | {f"aten.{name}.default": _change_ for name in ("clamp_", "clamp_min_", "clamp_max_", "neg_")}
    | {f"aten.{name}": _asked for name in ("norm.Scalar", "norm.ScalarOpt_dim", "_foreach_norm.Scalar", "where.self")}
    | {f"aten.{name}.default": _asked for name in ("linalg_vector_norm", "abs", "sum", "mean", "max", "min", "median")}
    | {f"aten.{name}.default": _asked for name in ("amax", "amin", "aminmax", "isnan", "isinf", "any", "all", "equal")}
    | {f"aten.{name}": _asked for name in ("sum.dim_IntList", "mean.dim", "histc.default", "count_nonzero.default")}
    | {f"aten.{name}.correction": _asked for name in ("std", "var", "std_mean", "var_mean")}
    | {f"aten.{name}.{kind}": _asked for name in ("eq", "ne", "lt", "le", "gt", "ge") for kind in ("Scalar", "Tensor")}
    | {
        "aten.as_strided.default": _as_strided,
        "aten.erfinv_.default": _erfinv_,
        "aten.eye.m_out": _eye,
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
