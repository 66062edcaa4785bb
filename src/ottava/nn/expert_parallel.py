"""Experts that lie on the ranks of a group: rows travel to their experts, and results back.

    x of this rank's tokens   -> sorted by expert -> all to all -> by expert, then by rank -> the experts of this rank
    y in the same order       -> all to all       -> sorted by expert -> summed per token

Where the recipe lets `GroupedLinear` cast rows before they are sorted, their codes and scales travel: a byte a number.
What comes back, and gradients, travel in the dtype of the activations. Rows of one expert lie in the order of the ranks
and of their tokens, so that GEMMs have the bits of one process that has all tokens in that order.
"""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ottava.kernels.reference import factors
from ottava.nn.moe import MoE
from ottava.nn.permutation import Permutation
from ottava.numerics.scaling import amax
from ottava.numerics.tensor import QuantizationSpec, QuantizedTensor
from ottava.ops.agreed import largest_of_all, scaled_by_hand
from ottava.ops.quantize import CastPlan, cast_both
from ottava.weights.parameter import is_quantized_weight


def all_to_all(rows: Tensor, to: list[int], come: list[int], group: dist.ProcessGroup) -> Tensor:
    """Rows for each rank, one after the other -> rows of each rank. They travel as bytes: gloo knows no FP8."""
    flat = rows.contiguous().view(torch.uint8) if rows.dtype.itemsize < 4 else rows.contiguous()
    arrived = flat.new_empty((sum(come), *flat.shape[1:]))
    dist.all_to_all_single(arrived, flat, come, to, group=group)
    return arrived.view(rows.dtype)


class RankPermutation:
    """What a `Permutation` is for one process: rows of the experts of this rank, from the tokens of all ranks.

    Args:
        own: of this rank's tokens to all experts.
        group: the ranks, in the order of their experts.
    """

    travels: ClassVar[bool] = True

    def __init__(self, own: Permutation, group: dist.ProcessGroup) -> None:
        ranks, self.own, self.group = dist.get_world_size(group), own, group
        sent = own.counts.view(ranks, -1)  # (ranks, experts of each)
        ones = [1] * ranks
        came = all_to_all(sent, ones, ones, group)  # (ranks, experts of this one)
        self.to, self.come = sent.sum(1).tolist(), came.sum(1).tolist()
        self.counts = came.sum(0)
        expert = torch.arange(came.shape[1], device=came.device).repeat(ranks).repeat_interleave(came.flatten())
        self.rows = expert.argsort(stable=True)
        """int64 (M,): where each row lies among those that came."""
        self.back = self.rows.argsort()

    def gather(self, x: Tensor) -> Tensor:
        """This rank's tokens -> rows of this rank's experts, without a gradient."""
        return self.deliver(self.own.gather(x))

    def cast(self, x: Tensor, spec: QuantizationSpec, plans: dict[Any, CastPlan]) -> QuantizedTensor:
        """`gather` as codes, where all rows of an expert have one scale: that of their amax on all ranks.

        Returns:
            codes (M, K), and the scale of each row (M, 1).
        """
        parts = self.own.gather(x.detach()).split(self.own.counts.tolist())
        own = [amax(part) if part.numel() else x.new_zeros(1, 1, dtype=torch.float32) for part in parts]
        factor = factors(largest_of_all(torch.cat(own), self.group), spec, None)
        by_hand, codes = scaled_by_hand(spec), []
        for part, scale in zip(parts, factor.scale.unbind(), strict=True):
            cast = cast_both(part, by_hand, None, scale=scale.reshape(()), plans=plans).row
            assert cast is not None
            codes.append(cast.data.view(torch.uint8))
        mine = factor.scale_inv.chunk(dist.get_world_size(self.group))[dist.get_rank(self.group)]
        data = self.deliver(torch.cat(codes)).view(spec.format.storage_dtype)
        return QuantizedTensor(data, mine.repeat_interleave(self.counts, 0), spec, x.dtype)

    def combine(self, y: Tensor) -> Tensor:
        """Rows of this rank's experts -> the sum of each token's rows, without a gradient."""
        return self.own.combine(self.collect(y))

    def deliver(self, rows: Tensor) -> Tensor:
        """Rows of this rank's tokens, sorted by expert -> rows of this rank's experts."""
        return all_to_all(rows, self.to, self.come, self.group).index_select(0, self.rows)

    def collect(self, rows: Tensor) -> Tensor:
        """The inverse of `deliver`."""
        return all_to_all(rows.index_select(0, self.back), self.come, self.to, self.group)


class ExpertRanks:
    """The ranks among which the experts of an `MoE` are divided.

    Args:
        mesh: of one dimension.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh, self.group = mesh, mesh.get_group()

    def apply(self, moe: MoE, src_data_rank: int | None = 0) -> None:
        """Leaves this rank its experts.

        Raises:
            ValueError: experts that the ranks cannot share evenly.  TypeError: weights that are stored as codes.
        """
        ranks = self.mesh.size()
        for layer in (moe.up, moe.down):
            experts = layer.weight.shape[0]
            if experts % ranks:
                raise ValueError(
                    f"ExpertParallel: {experts} experts on {ranks} ranks; needs as many on each. Take a number of "
                    f"ranks that divides {experts}"
                )
            if is_quantized_weight(layer.weight):
                raise TypeError(
                    "ExpertParallel: the experts are stored only as codes, which torch cannot divide among ranks; call "
                    "ottava.convert(model, recipe, weights='bf16') first"
                )
            layer.first = experts // ranks * self.mesh.get_local_rank()
            for part in layer.groups:
                part.first = layer.first
            for name, parameter in list(layer._parameters.items()):
                if parameter is not None and not isinstance(parameter, DTensor):
                    split = distribute_tensor(parameter, self.mesh, [Shard(0)], src_data_rank=src_data_rank)
                    layer._parameters[name] = nn.Parameter(split, parameter.requires_grad)
        moe.ranks = self

    def plan(self, own: Permutation) -> Any:
        """Where this rank's rows go, and which come."""
        return RankPermutation(own, self.group)

    def collect(self, rows: Tensor, plan: RankPermutation) -> Tensor:
        """Results of this rank's experts -> those of this rank's tokens, sorted by expert."""
        return _Collect.apply(plan, rows)  # type: ignore[no-any-return]

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a model whose experts lie on several ranks cannot be pickled: its process group exists here only. Save "
            "its state_dict with torch.distributed.checkpoint"
        )


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: RankPermutation, rows: Tensor) -> Tensor:
        ctx.plan = plan
        return plan.collect(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        return None, ctx.plan.deliver(grads[0])
