"""Casts one rank's shard of a matrix with the scales of the whole matrix.

A block that reaches over all ranks (a tensor, a row whose columns are split) needs the largest magnitude of all ranks.
The ranks reduce their amaxes before the cast, so the codes of all shards joined are those of the joined matrix, bit for
bit, and a GEMM may gather codes instead of numbers. Blocks on one rank need no agreement. A transform comes before the
cast: ranks sum its means and reduce its factors, one of them draws its signs, and a rotation turns columns of one rank.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, NoReturn, Self

import torch
import torch.distributed as dist
from torch import Tensor

from ottava.kernels.reference import factors
from ottava.numerics.rounding import encode_, infinities_to_nan_
from ottava.numerics.scaling import BLOCK_SCALES, PER_TENSOR, Scale, amax
from ottava.numerics.tensor import Beside, Both, Operand, QuantizationSpec, QuantizedTensor
from ottava.numerics.transforms import OneRank
from ottava.ops.quantize import CastPlan, cast_both, transformed


class AgreedCast:
    """The cast of a door whose matrix is split over ranks; it replaces `ops.quantize.cast_both`.

    Args:
        group: the ranks that hold the shards.
        dim: which dimension of x (R, C) is split: 0 or 1.

    All ranks must cast the same tensors in the same order, because each cast may hold a collective.
    """

    def __init__(self, group: dist.ProcessGroup, dim: int) -> None:
        self.group, self.dim = group, dim

    def __call__(
        self,
        x: Tensor,
        spec: QuantizationSpec | None,
        spec_t: QuantizationSpec | None,
        *,
        scale: Tensor | None = None,
        staged: Tensor | None = None,
        plans: dict[Any, CastPlan] | None = None,
        beside: Beside = (None, None),
    ) -> Both:
        """As `ops.quantize.cast_both`, with the largest amax of all ranks; it stages nothing."""
        known = spec or spec_t
        assert known is not None
        # no collective for a prediction: all ranks made it of the same amaxes
        if known.scaling == "delayed" and scale is not None and scale.is_cpu and bool(scale > 0):
            # predicted, and equal on all ranks; on an accelerator the host would wait for the comparison
            return cast_both(x, spec, spec_t, scale=scale, staged=staged, plans=plans)
        how: Any = {"scale": scale, "plans": plans}
        row = None if spec is None else self._cast(x, spec, self.dim, beside[0], **how)
        # one cast and one collective serve both
        if row is not None and spec == spec_t and row.spec.granularity.transposes and row.spec.transform is None:
            col: QuantizedTensor | None = row.t()
        else:
            col = None if spec_t is None else self._cast(x.t(), spec_t, 1 - self.dim, beside[1], **how)
        one = row or col
        assert one is not None
        return Both(row, col, one.amax)

    def _cast(self, x: Tensor, spec: QuantizationSpec, dim: int, other: Operand | None, **how: Any) -> QuantizedTensor:
        """x, split along dim, cast to spec; how: as of `_scaled`."""
        if spec.transform is None:
            return self._scaled(x, spec, dim, **how)
        y, aside = transformed(x.detach(), spec.transform, other, _Ranks(self.group, dim))
        y_q = self._scaled(y, spec, dim, **how)
        return QuantizedTensor(y_q.data, y_q.scale_inv, spec, x.dtype, y_q.amax, aside)

    def _scaled(
        self, x: Tensor, spec: QuantizationSpec, dim: int, scale: Tensor | None, plans: dict[Any, CastPlan] | None
    ) -> QuantizedTensor:
        """The cast behind a transform."""
        granularity, two_levels = spec.granularity, spec.scale_format == "e4m3"
        # a whole extent along the split dimension lies on several ranks; any other block lies on one
        reaches_over = (granularity.rows, granularity.cols)[dim] is None
        if not reaches_over and not two_levels:
            bare = spec if spec.transform is None else scaled_by_hand(spec)
            x_q = cast_both(x, bare, None, scale=scale, plans=plans).row
            assert x_q is not None
            return x_q
        largest = amax(x.detach(), granularity)
        if reaches_over:
            largest = self._largest(largest)
        factor = self._two_levels(x, largest, spec) if two_levels else factors(largest, spec, scale)
        if granularity == PER_TENSOR:  # by the fastest kernel
            # a given scale lets every kernel cast: only the amax was a matter of all ranks
            x_q = cast_both(x, scaled_by_hand(spec), None, scale=factor.scale.reshape(()), plans=plans).row
            assert x_q is not None
            return QuantizedTensor(x_q.data, factor.scale_inv, spec, x.dtype, largest)
        # no kernel takes a scale for each block, so torch's operations cast here, with the reference's bits
        numbers = infinities_to_nan_(x.detach().to(torch.float32, copy=True), spec.format)
        numbers = granularity.multiply_(numbers, factor.scale)
        return QuantizedTensor(
            encode_(numbers, spec.format, rounding=spec.rounding), factor.scale_inv, spec, x.dtype, largest
        )

    def _two_levels(self, x: Tensor, largest: Tensor, spec: QuantizationSpec) -> Scale:
        """NVFP4's scales: one a block, below the scale of the whole tensor, on which the ranks agree."""
        # one infinity on one rank must not decide the scale of the whole tensor
        finite = torch.where(largest.isfinite(), largest, 0.0)
        top = self._largest(finite.amax().reshape(1, 1) if finite.numel() else finite.new_zeros(1, 1))
        if spec.block_scale != "amax":
            group = None if spec.transform is None else spec.transform.group
            return BLOCK_SCALES[spec.block_scale](x, largest, spec.granularity, group, top)
        both = spec.scale_of(torch.cat([largest.reshape(-1, 1), top]))  # the tensor's amax among its blocks
        return Scale(both.scale[:-1].reshape(largest.shape), both.scale_inv[:-1].reshape(largest.shape))

    def _largest(self, amaxes: Tensor) -> Tensor:
        return largest_of_all(amaxes, self.group)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # a copied layer is split over the same ranks

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a model that is split over ranks cannot be pickled: its process group exists here only. Save its "
            "state_dict with torch.distributed.checkpoint"
        )


@dataclass(frozen=True)
class _Ranks(OneRank):
    """The numbers of a transform of all ranks that hold a tensor, split along dim."""

    group: dist.ProcessGroup
    dim: int

    def sum(self, numbers: Tensor, dim: int) -> Tensor:
        if dim == self.dim:  # along the other dimension this rank has all of them
            dist.all_reduce(numbers, dist.ReduceOp.SUM, group=self.group)
        return numbers

    def largest(self, numbers: Tensor, dim: int) -> Tensor:
        return largest_of_all(numbers, self.group) if dim == self.dim else numbers

    def same(self, drawn: Tensor) -> Tensor:
        dist.broadcast(drawn, dist.get_global_rank(self.group, 0), group=self.group)
        return drawn


def largest_of_all(amaxes: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The largest of all ranks, entry by entry; infinite if a rank has a NaN, because collectives do not order NaN."""
    # MAX of a collective may drop a NaN on one backend and keep it on another
    amaxes = torch.where(amaxes.isnan(), torch.inf, amaxes)
    dist.all_reduce(amaxes, dist.ReduceOp.MAX, group=group)
    return amaxes


@functools.lru_cache(maxsize=64)
def scaled_by_hand(spec: QuantizationSpec) -> QuantizationSpec:
    """The spec without the rule that chooses its scale, and without its transform: scale and numbers are given."""
    return replace(spec, scaling="current", transform=None)
