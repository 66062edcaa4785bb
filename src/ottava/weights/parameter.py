"""A parameter that is stored only as FP8 codes and scales: `QuantizedWeight`.

To autograd, optimizers, DDP, FSDP2 and state dicts it is a parameter of its outer dtype; in memory it is `codes` and
`scales`. It supports the few operations that training needs: moving, copying, sharding, filling. It refuses all
others by name, so that nothing dequantizes a weight silently. Its door (`quantizer.WeightQuantizer`) hands the stored
codes to both GEMMs. `requantize_` stores new numbers, usually from an optimizer's master copy.

There is one function for each operation that training needs: to hold, view, move, copy, cut and fill a parameter.
Questions about its numbers (norms, extremes, comparisons) are asked of the dequantized numbers. No other operation
computes. In these functions `func` is the operation, and the rest is as torch calls it.

codes   spec.format.storage_dtype, the shape of the weight
scales  fp32, one a block; where they are powers of two in E8M0's range by definition (MX), their exponents in uint8
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ottava.base.errors import need
from ottava.kernels.gate import mapped
from ottava.numerics.scaling import PER_TENSOR, exponent_bytes, read_scales
from ottava.numerics.tensor import Lent, QuantizationSpec, QuantizedTensor
from ottava.ops.quantize import dequantize, quantize

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""What a stored weight may look like from outside."""


@functools.lru_cache(maxsize=256)  # FSDP2's gathers ask in each step
def stored_spec(spec: QuantizationSpec) -> QuantizationSpec:
    """The spec to store a weight of that cell with: the amax of the numbers is known, so it predicts no scale.

    A cell with a transform cannot be stored; its rule for block scales may need the transform.

    Example:
        >>> from ottava.numerics.formats import E4M3
        >>> str(stored_spec(QuantizationSpec(E4M3, scaling="delayed", amax_history_len=4)))
        'E4M3[tensor]'
    """
    rule = spec.block_scale if spec.transform is None else "amax"
    return QuantizationSpec(spec.format, spec.granularity, spec.scale_format, margin=spec.margin, block_scale=rule)


def scale_dtype(spec: QuantizationSpec) -> torch.dtype:
    """What the scales of a stored weight are kept in."""
    return torch.uint8 if spec.scale_format in ("e8m0", "e8m0_floor") else torch.float32


def store_scales(scale_inv: Tensor, spec: QuantizationSpec) -> Tensor:
    """fp32 scales as a stored weight keeps them; E8M0's bytes are the exponent fields of the fp32 numbers.

    Example:
        >>> from ottava.numerics.formats import E4M3
        >>> from ottava.numerics.scaling import BLOCK_1X32
        >>> store_scales(torch.tensor([[0.5, 1.0]]), QuantizationSpec(E4M3, BLOCK_1X32, scale_format="e8m0"))
        tensor([[126, 127]], dtype=torch.uint8)
    """
    if scale_dtype(spec) == torch.float32:
        return scale_inv
    return exponent_bytes(scale_inv)


def adopt_scales(found: Tensor, spec: QuantizationSpec) -> Tensor:
    """Scales of a state dict, in fp32 or in E8M0's bytes, as a weight of this spec keeps them.

    Raises:
        ValueError: the spec has powers of two, and these are none, or too large or small for a byte.
    """
    found = found.view(torch.uint8) if found.dtype == torch.float8_e8m0fnu else found
    scale_inv = read_scales(found) if found.dtype == torch.uint8 else found.to(torch.float32)
    fits = {"pow2": powers_only, "e8m0": fit_bytes, "e8m0_floor": fit_bytes}.get(spec.scale_format)
    # NaN decodes a block that has become NaN
    if fits is not None and not found.is_meta and not fits(torch.where(scale_inv.isnan(), 1.0, scale_inv)):
        raise ValueError(f"got scales that are no powers of two; this model stores {spec}")
    return store_scales(scale_inv, spec)


def powers_only(scale_inv: Tensor) -> bool:
    """Whether all scales are powers of two; False where they cannot be read."""
    mantissas, _ = torch.frexp(scale_inv.float())
    return not scale_inv.is_meta and bool((mantissas == 0.5).all())


def fit_bytes(scale_inv: Tensor) -> bool:
    """Whether all fp32 scales are powers of two from 2**-127 to 2**127, those of E8M0.

    Example:
        >>> fit_bytes(torch.tensor([[2.0**-127, 1.0]])), fit_bytes(torch.tensor([[2.0**-128, 1.0]]))
        (True, False)
    """
    return torch.equal(read_scales(exponent_bytes(scale_inv)), scale_inv) and bool(scale_inv.isfinite().all())


def check_storage(
    codes: Tensor, scales: Tensor, spec: QuantizationSpec, dtype: torch.dtype, matrix: tuple[int, ...]
) -> None:
    """Refuses codes and scales that are no weight.

    Raises:
        TypeError: their dtypes, or the outer one.  ValueError: their shapes.
    """
    if dtype not in FLOATS:
        raise TypeError(f"QuantizedWeight: got outer dtype {dtype}; needs float32, bfloat16 or float16")
    wanted = spec.format.storage_dtype, scale_dtype(spec)
    if (codes.dtype, scales.dtype) != wanted:
        raise TypeError(
            f"QuantizedWeight: got {codes.dtype} codes and {scales.dtype} scales; {spec} has {wanted[0]} codes and "
            f"{wanted[1]} scales (weights.parameter.store_scales makes them of fp32)"
        )
    if len(matrix) not in (2, 3):
        raise ValueError(f"QuantizedWeight: got codes {matrix}; needs (N, K) or (G, N, K)")
    grid = (*matrix[:-2], *spec.granularity.grid_shape((matrix[-2], matrix[-1])))
    if tuple(scales.shape) != grid:
        raise ValueError(f"QuantizedWeight: got scales {tuple(scales.shape)} for codes {matrix}; {spec} has {grid}")


_Sizes = tuple[int, ...]


@dataclass(eq=False)
class Common:
    """What a weight has in common with its views, so that a write through one of them, as `.data`, reaches it."""

    high_precision: Tensor | None = None
    writes: int = 0
    """So many times were its numbers written; optimizers ask. A version of torch's is not one for all views of codes,
    because they are made below autograd."""


def describe(weight: QuantizedWeight | None) -> str:
    """For messages."""
    return "a QuantizedWeight" if weight is None else f"a weight {tuple(weight.shape)} stored as {weight.spec}"


def refuse(func: Any, *args: Any, **settings: Any) -> Any:
    """Any other operation.

    Raises:
        NotImplementedError: always.
    """
    weight = next((a for a in tree_leaves((args, settings)) if isinstance(a, QuantizedWeight)), None)
    raise NotImplementedError(
        f"{func}: {describe(weight)} takes no such operation: it is stored only as codes. Compute on "
        "weight.dequantize(), and store a result with weight.requantize_(values); an optimizer that steps it "
        "keeps a master copy, as ottava.optim.AdamW(master='fp32') does. A weight norm, another parametrization, a "
        "pruning mask, or an average (AveragedModel with a multi_avg_fn) needs numbers: call ottava.convert(module, "
        "recipe, weights='bf16') before"
    )


def _alias(func: Any, weight: QuantizedWeight, *_: Any, **__: Any) -> QuantizedWeight:
    return _same(weight, weight.codes)


def _same(weight: QuantizedWeight, codes: Tensor) -> QuantizedWeight:
    """All of a weight, seen through these codes."""
    return weight.like(codes, weight.scales, common=weight.common, part_of=weight.part_of, matrix=weight.matrix)


def _view(func: Any, weight: QuantizedWeight, size: Sequence[int]) -> QuantizedWeight:
    codes = weight.codes.view(size)
    if tuple(codes.shape) not in (tuple(weight.shape), weight.matrix, (weight.numel(),)):
        raise NotImplementedError(f"{func}: {describe(weight)} cannot be seen as {tuple(codes.shape)}")
    return _same(weight, codes)


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
    scales = weight.scales[first // rows : -(-last // rows)] if weight.scales_shard else weight.scales
    return weight.like(weight.codes[first:last], scales, part_of=(weight, slice(first, last)))


def _split(func: Any, weight: QuantizedWeight, size: Any, dim: int = 0) -> list[QuantizedWeight]:
    length = weight.shape[dim]
    sizes = [min(size, length - i) for i in range(0, length, size)] if isinstance(size, int) else list(size)
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [_slice(func, weight, dim, end - one, end) for one, end in zip(sizes, ends, strict=True)]


def _select(func: Any, weight: QuantizedWeight, dim: int, index: int) -> QuantizedWeight:
    if weight.dim() != 3 or dim:
        raise NotImplementedError(
            f"{func}: {describe(weight)} is no stack of matrices along dimension {dim}; "
            "weight.dequantize() gives its numbers"
        )
    return weight.like(weight.codes[index], weight.scales[index], part_of=(weight, index))


def each_part(func: Any, weight: QuantizedWeight, *args: Any, **settings: Any) -> QuantizedWeight:
    """The same operation on codes and scales: a copy, or another place."""
    dtype = settings.pop("dtype", None) or weight.dtype
    kept = None if weight.high_precision is None else weight.high_precision.to(dtype, copy=True)
    codes, scales = (func(part, *args, **settings) for part in (weight.codes, weight.scales))
    return weight.like(codes, scales, high_precision=kept, matrix=weight.matrix, dtype=dtype, lent=None)


def _new_zeros(func: Any, weight: QuantizedWeight, size: Sequence[int], **settings: Any) -> Tensor:
    """A QuantizedWeight for FSDP2, which asks for a weight with more or fewer rows; else a plain tensor."""
    if len(size) != weight.dim() or tuple(size[1:]) != tuple(weight.shape[1:]) or settings.get("dtype"):
        return _plain_like(func, weight, size, **settings)
    codes = func(weight.codes, size, **settings)
    grid = (*size[:-2], *weight.spec.granularity.grid_shape((size[-2], size[-1])))
    return weight.like(codes, store_scales(torch.ones(grid, device=codes.device, dtype=torch.float32), weight.spec))


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
            to.high_precision.copy_(values.view(to.matrix))
        return to
    if to.shares_scale:  # one scale for it and for the rest
        to.requantize_(source.numbers().view(to.shape))
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


def _fill_(func: Any, weight: QuantizedWeight, *args: Any, **settings: Any) -> QuantizedWeight:
    """New numbers, made in the outer dtype and then cast: how layers are initialized."""
    values = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
    weight.requantize_(func(values, *args, **settings))
    weight.uniform = (args, settings) if "uniform_" in str(func) else None
    return weight


def _erfinv_(func: Any, weight: QuantizedWeight) -> QuantizedWeight:
    """trunc_normal_ before torch 2.13: of uniform numbers, drawn anew in FP32, because codes of them have no tails."""
    if weight.uniform is None:
        return refuse(func, weight)  # type: ignore[no-any-return]
    args, settings = weight.uniform
    weight.requantize_(
        func(torch.empty(weight.shape, dtype=torch.float32, device=weight.device).uniform_(*args, **settings))
    )
    return weight


def _change_(func: Any, weight: QuantizedWeight, *args: Any, **settings: Any) -> QuantizedWeight:
    """Its numbers, changed by numbers: by tensors only an optimizer changes them, which needs a master."""
    mask = args[:1] if "masked_fill_" in str(func) else ()
    if any(isinstance(one, Tensor) and one.dim() for one in args[len(mask) :]):
        return refuse(func, weight, *args)  # type: ignore[no-any-return]
    weight.requantize_(func(weight.numbers(), *args, **settings))
    return weight


def _lerp_(func: Any, to: Any, source: Any, *weight: Any) -> Any:
    """A step of an average that is kept in numbers: codes would lose each change that is smaller than their distance.

    `AveragedModel` takes it for all averages with a `multi_avg_fn`.
    """
    if any(isinstance(one, QuantizedWeight) for one in tree_leaves(to)):
        return refuse(func, to, source)
    return _asked(func, to, source, *weight)


def _eye(func: Any, *size: int, out: QuantizedWeight, **settings: Any) -> QuantizedWeight:
    out.requantize_(torch.eye(*size, dtype=torch.float32, device=out.device))
    return out


def _asked(func: Any, *args: Any, **settings: Any) -> Any:
    """A question about the numbers."""
    plain = tree_map(lambda one: one.dequantize() if isinstance(one, QuantizedWeight) else one, (args, settings))
    return func(*plain[0], **plain[1])


def _cat(func: Any, tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """A plain tensor, for parameters_to_vector, and for DistributedDataParallel's ranks, which have the codes already.

    FullyShardedDataParallel would keep nothing else; it joins detached tensors, and the former views of parameters.
    """
    own = (t for t in tensors if isinstance(t, QuantizedWeight) and not t.sent)
    weight = next((t for t in own if not isinstance(t._base, torch.nn.Parameter)), None)
    if weight is not None:
        raise NotImplementedError(
            f"{func}: {describe(weight)} would become a tensor of numbers, as in FullyShardedDataParallel. Shard with "
            "torch.distributed.fsdp.fully_shard, which gathers codes; or join weight.dequantize()"
        )
    return torch.cat([t.dequantize() if isinstance(t, QuantizedWeight) else t for t in tensors], dim)


def _broadcast_(func: Any, tensors: Sequence[QuantizedWeight], *args: Any) -> Any:
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
    | {f"aten.{name}_like.default": _plain_like for name in ("zeros", "ones", "full", "rand", "randn")}
    | {f"aten.new_{name}.default": _plain_like for name in ("empty", "ones", "full")}
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
    | {f"aten.{name}.Scalar": _lerp_ for name in ("lerp_", "_foreach_lerp_")}
    | {
        "aten.as_strided.default": _as_strided,
        "aten.erfinv_.default": _erfinv_,
        "aten.eye.m_out": _eye,
        "aten.cat.default": _cat,
        "aten.copy_.default": _copy_,
        "aten.is_pinned.default": lambda _, weight, *args: weight.codes.is_pinned() and weight.scales.is_pinned(),
        "aten.new_zeros.default": _new_zeros,
        "aten.select.int": _select,
        "aten.slice.Tensor": _slice,
        "aten.unbind.int": lambda func, x, dim=0: [_select(func, x, dim, i) for i in range(x.shape[dim])],
        "c10d.broadcast_.default": _broadcast_,
    }
)
"""What training needs of a weight: torch's operation -> how it is done."""


class QuantizedWeight(Tensor):
    """A weight (N, K), or a stack (G, N, K), that memory holds only as codes and scales.

    Args:
        codes: in spec.format.storage_dtype, contiguous; the shape of the weight.
        scales: one entry a block: spec.granularity.grid_shape((N, K)), with G in front for a stack; fp32, or uint8 with
            E8M0's exponents where the spec says so.
        spec: how it was cast; `stored_spec` of a recipe's cell.
        dtype: outer dtype, which other code and the gradient see: float32, bfloat16 or float16.
        requires_grad: as for any tensor.
        high_precision: the numbers before the cast, or None.
        matrix: the shape of the whole weight, if this one is a flat view.
        group, sent, lent, common, part_of: see below; a view shares `common` with what it is a view of.
    Raises:
        TypeError, ValueError: codes, scales or dtype do not fit.

    In-place operations that write new numbers cast them: `copy_` from a plain tensor, the fills of torch.nn.init, and
    `mul_`, `clamp_` and the like with numbers. `w.copy_(w.dequantize())` changes no bit. Norms, extremes, comparisons
    and the like read the dequantized numbers. Arithmetic with tensors raises NotImplementedError.

    Example:
        >>> from ottava.numerics.formats import E4M3
        >>> weight = quantized_weight(torch.tensor([[0.5, -3.0], [14.0, 7.0]]), QuantizationSpec(E4M3))
        >>> weight.dtype, weight.codes.dtype, weight.dequantize()[1]
        (torch.float32, torch.float8_e4m3fn, tensor([14.,  7.]))
    """

    codes: Tensor
    scales: Tensor
    spec: QuantizationSpec
    common: Common
    part_of: tuple[QuantizedWeight, slice | int] | None
    """The weight whose rows or matrices these are, and which of them; None: these are all."""
    matrix: _Sizes
    group: dist.ProcessGroup | None
    """The ranks that hold the other shards of this weight, as FSDP2 tells them."""
    sent: bool
    """Whether all ranks of a DistributedDataParallel have its codes."""
    lent: Lent | None
    """The state of FSDP2's last gather; None: the weight owns its memory."""
    uniform: tuple[Any, Any] | None = None
    """The arguments of `uniform_`, if that was the last write."""

    @staticmethod
    def __new__(
        cls: type[QuantizedWeight],
        codes: Tensor,
        scales: Tensor,
        spec: QuantizationSpec,
        dtype: torch.dtype,
        *,
        requires_grad: bool = False,
        high_precision: Tensor | None = None,
        matrix: Sequence[int] | None = None,
        group: dist.ProcessGroup | None = None,
        sent: bool = False,
        lent: Lent | None = None,
        common: Common | None = None,
        part_of: tuple[QuantizedWeight, slice | int] | None = None,
    ) -> QuantizedWeight:
        check_storage(codes, scales, spec, dtype, tuple(matrix or codes.shape))
        weight: QuantizedWeight = Tensor._make_wrapper_subclass(
            cls, codes.shape, dtype=dtype, device=codes.device, requires_grad=requires_grad
        )
        weight.codes, weight.scales, weight.spec = codes, scales, spec
        weight.common, weight.matrix = common or Common(high_precision), tuple(matrix or codes.shape)
        weight.part_of = part_of
        weight.group, weight.sent, weight.lent = group, sent, lent
        return weight

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # torch's own way

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch calls a classmethod
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        handler = OPERATIONS.get(str(func))
        if torch.is_inference_mode_enabled():  # torch takes no operation apart there, and refuses views made there
            if handler is None and (made := func.decompose(*args, **(kwargs or {}))) is not NotImplemented:
                return made
            with torch.inference_mode(False), torch.no_grad():
                return cls.__torch_dispatch__(func, types, args, kwargs)
        return (handler or refuse)(func, *args, **(kwargs or {}))

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """code * scale_inv in fp32, rounded once to `dtype` (its own by default), as a plain tensor.

        Gradients pass through it unchanged.
        """

        def numbers(_: Tensor) -> Tensor:
            pairs = [(codes, read_scales(scales)) for codes, scales in self._stored()]
            parts = [dequantize(QuantizedTensor(*pair, self.spec, own), dtype or own) for pair in pairs]
            return (torch.stack(parts) if len(self.matrix) == 3 else parts[0]).view(self.shape)

        own = self.dtype
        return mapped(numbers, lambda dy: dy.to(own), self)  # type: ignore[no-any-return]

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
            TypeError: no tensor.  ValueError: another shape.
        Edge cases: as in every cast, NaN stays NaN and an infinity becomes NaN. A block with either has scale 1, so its
            small numbers lose bits; in a format without NaN all of it is NaN. Nothing is raised, since that would wait
            for a GPU.
            Rows of a weight with one scale are written by a cast of the whole weight: what the others stand for is
            cast anew, by the new scale; `amax` says nothing then.
            The shards of one weight under FSDP2 share the scale of a whole tensor, so there every rank has to call it
            (one all-reduce of a number).
        """
        need("requantize_", values, Tensor, f"a tensor {tuple(self.shape)} of the new numbers")
        if values.shape != self.shape:
            raise ValueError(f"requantize_: got {tuple(values.shape)} for {describe(self)}; needs {tuple(self.shape)}")
        values = values.detach().to(device=self.device, dtype=self.dtype)
        if self.is_meta:
            pass
        elif self.part_of is not None and self.shares_scale:
            whole, where = self.part_of
            numbers = whole.numbers()
            numbers[where] = values.view(self.matrix)
            whole.requantize_(numbers)
        else:
            rows = values.view(self.matrix)
            known = self._known_amax(rows, amax)
            given = None if known is None else self.spec.scale_of(known)
            for (codes, scales), part in zip(
                self._stored(), rows.unbind() if rows.dim() == 3 else (rows,), strict=True
            ):
                cast = quantize(part, self.spec, scale=None if given is None else given.scale)
                codes.copy_(cast.data)
                scale_inv = (
                    cast.scale_inv if given is None else given.scale_inv.maximum(cast.scale_inv)
                )  # NaN of either
                scales.copy_(store_scales(scale_inv, self.spec))
        if self.high_precision is not None:
            self.high_precision = _kept(values).view(self.matrix)
        self.was_written(values)

    def drop_high_precision(self) -> None:
        """Frees the numbers before the cast; an optimizer calls it after it has made its master copy."""
        self.high_precision = None

    def share_memory_(self) -> QuantizedWeight:
        """Moves codes and scales into memory that processes share, as torch's."""
        self.codes.share_memory_(), self.scales.share_memory_()
        return self

    def quantized(self) -> QuantizedTensor:
        """The matrix as operands are: its codes and scales, sharing memory but for scales that are stored as bytes.

        Raises:
            ValueError: it is a stack; take one with `weight[i]`.
        """
        if len(self.matrix) != 2:
            raise ValueError(f"quantized: got {describe(self)}; needs one matrix: weight[i]")
        return QuantizedTensor(self.codes.view(self.matrix), self.scale_inv, self.spec, self.dtype)

    @property
    def data(self) -> QuantizedWeight:
        """The same codes and scales without a graph, as torch's."""
        return self.detach()  # type: ignore[return-value]

    @data.setter
    def data(self, values: Tensor) -> None:
        need("weight.data", values, Tensor, "a tensor of numbers or codes")
        if (values.shape, values.dtype, values.device) != (self.shape, self.dtype, self.device):
            raise ValueError(
                f"weight.data: got {tuple(values.shape)} {values.dtype} on {values.device} for {describe(self)}, "
                f"{self.dtype} on {self.device}, which it stays. Use model.to(...) for another device or dtype"
            )
        with torch.no_grad():
            self.copy_(values)

    @property
    def high_precision(self) -> Tensor | None:
        """The numbers before the last cast, in the outer dtype, on the CPU; None: not kept (`drop_high_precision`)."""
        return self.common.high_precision

    @high_precision.setter
    def high_precision(self, numbers: Tensor | None) -> None:
        self.common.high_precision = numbers

    @property
    def scales_shard(self) -> bool:
        """Whether a piece of the first dimension has its own scales; False: a whole matrix has one."""
        return len(self.matrix) == 3 or self.spec.granularity.rows is not None

    @property
    def shares_scale(self) -> bool:
        """Whether it is a part of a matrix that has one scale: new numbers change that of the rest."""
        return self.part_of is not None and self.scales is self.part_of[0].scales

    def numbers(self) -> Tensor:
        """In memory of their own: those before the cast where they are kept, else those of the codes."""
        kept = self._kept_numbers()
        return self.dequantize() if kept is None else kept.to(self.device, copy=True).view(self.shape)

    def _kept_numbers(self) -> Tensor | None:
        whole, where = self.part_of or (None, 0)
        kept = None if whole is None else whole._kept_numbers()
        return self.high_precision if kept is None else kept[where]

    def was_written(self, numbers: Tensor | None = None) -> None:
        """Tells all that share its memory.

        numbers: what was written, if known; else those of the codes.
        """
        torch.autograd.graph.increment_version((self, self.codes))
        self.uniform = None
        self.common.writes += 1
        if self.part_of is not None:
            whole, where = self.part_of
            if (kept := whole._kept_numbers()) is not None:
                kept[where] = (self.dequantize() if numbers is None else numbers).view(self.matrix).to(kept.device)
            whole.was_written(kept)

    @property
    def scale_inv(self) -> Tensor:
        """fp32, one a block: the factor that dequantizes; the memory of `scales` where these are fp32."""
        return read_scales(self.scales)

    def like(self, codes: Tensor, scales: Tensor, **changes: Any) -> QuantizedWeight:
        """The same kind of weight with other codes and scales."""
        own = {"matrix": codes.shape, "group": self.group, "sent": self.sent, "dtype": self.dtype, "lent": self.lent}
        return QuantizedWeight(codes, scales, self.spec, **(own | changes))

    def _stored(self) -> list[tuple[Tensor, Tensor]]:
        """Codes and scales of each matrix."""
        codes = self.codes.view(self.matrix)
        return list(zip(codes, self.scales, strict=True)) if len(self.matrix) == 3 else [(codes, self.scales)]

    def _known_amax(self, values: Tensor, amax: Tensor | None) -> Tensor | None:
        """The amax to scale a whole tensor by, (1, 1) fp32; None: each cast finds its own."""
        if self.spec.granularity != PER_TENSOR or values.dim() != 2:
            return None
        if self.group is None:
            return None if amax is None else amax.to(torch.float32).reshape(1, 1)
        own = values.abs().amax() if amax is None and values.numel() else values.new_zeros(()) if amax is None else amax
        shared = own.to(torch.float32).reshape(1, 1).nan_to_num(torch.inf, torch.inf)  # collectives do not order NaN
        dist.all_reduce(shared, dist.ReduceOp.MAX, group=self.group)
        return shared

    @property
    def nbytes(self) -> int:  # type: ignore[override]  # an attribute of torch's
        """Bytes of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes

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
        scales = (self.scales if self.scales_shard else self.scales[None]).contiguous()
        return (self.codes.view(torch.uint8), scales), scales

    def fsdp_post_all_gather(
        self, all_gather_outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        """The whole weight from the gathered tensors; it shares their memory."""
        if out is not None:  # it has this memory already
            return None
        data, *gathered = all_gather_outputs
        own = gathered[0] if gathered else metadata  # on one rank torch gathers the first tensor alone
        codes = data.view(self.spec.format.storage_dtype)
        scales = own if self.scales_shard else own[0]
        return self.like(codes, scales, group=None, dtype=param_dtype, lent=Lent()), all_gather_outputs

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scales"], (self.spec, self.dtype, self.matrix, self.requires_grad)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], said: Any, size: Any, stride: Any) -> QuantizedWeight:
        spec, dtype, matrix, grad = said
        return QuantizedWeight(inner["codes"], inner["scales"], spec, dtype, requires_grad=grad, matrix=matrix)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"QuantizedWeight({tuple(self.shape)}, {self.spec}, {self.dtype}, device={str(self.device)!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedWeight:
        if id(self) in memo:
            return memo[id(self)]  # type: ignore[no-any-return]
        with torch.no_grad():
            copy = _as_it_was(each_part(torch.ops.aten.clone.default, self), self)
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        said = self.spec.to_dict(), self.dtype, self.requires_grad, isinstance(self, nn.Parameter)
        codes = self.codes.view(torch.uint8)  # pickle knows no storage of float8
        return _rebuilt, (codes, self.scales, *said, self.high_precision, self.matrix)


def is_quantized_weight(tensor: Any) -> TypeGuard[QuantizedWeight]:
    """Whether a tensor is stored only as FP8 codes and scales."""
    return isinstance(tensor, QuantizedWeight)


def local(tensor: Any) -> Any:
    """This rank's part of a tensor that ranks share; others as they are."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def quantized_weight(values: Tensor, spec: QuantizationSpec, *, keep_high_precision: bool = False) -> QuantizedWeight:
    """A weight with these numbers, stored only as codes and scales.

    Args:
        values: (N, K), or (G, N, K) for a stack of matrices with scales of their own; any device, also meta.
        spec: of the weight's cell; its scale is always that of the numbers that are stored, see `stored_spec`.
        keep_high_precision: keep a copy of the numbers on the CPU, for the master copy of an optimizer.
    Raises:
        TypeError: dtype.  ValueError: neither a matrix nor a stack.
    """
    spec, values = stored_spec(spec), values.detach()
    if values.dim() not in (2, 3) or values.dtype not in FLOATS:
        raise ValueError(
            f"quantized_weight: got {values.dtype} {tuple(values.shape)}; needs (N, K) or (G, N, K) in float32, "
            "bfloat16 or float16"
        )
    grid = (*values.shape[:-2], *spec.granularity.grid_shape((values.shape[-2], values.shape[-1])))
    codes = torch.empty(values.shape, dtype=spec.format.storage_dtype, device=values.device)
    scales = store_scales(torch.ones(grid, device=values.device, dtype=torch.float32), spec)
    weight = QuantizedWeight(codes, scales, spec, values.dtype)
    weight.requantize_(values)
    if keep_high_precision:
        weight.high_precision = _kept(values)
    return weight


def _kept(values: Tensor) -> Tensor:
    return values.clone() if values.is_cpu or values.is_meta else values.cpu()


def _as_it_was(weight: QuantizedWeight, other: QuantizedWeight) -> QuantizedWeight:
    if isinstance(other, nn.Parameter):
        return nn.Parameter(weight, other.requires_grad)  # type: ignore[return-value]
    return weight.requires_grad_(other.requires_grad)  # type: ignore[return-value]


def _rebuilt(
    codes: Tensor, scales: Tensor, spec: dict[str, Any], dtype: torch.dtype, requires_grad: bool, *rest: Any
) -> Any:
    (held, high_precision, matrix), own = rest, QuantizationSpec.from_dict(spec)
    codes = codes.view(own.format.storage_dtype)
    scales = scales if scales.dtype == scale_dtype(own) else store_scales(scales, own)  # of an earlier version
    made = QuantizedWeight(codes, scales, own, dtype, high_precision=high_precision, matrix=matrix)
    return nn.Parameter(made, requires_grad) if held else made.requires_grad_(requires_grad)
