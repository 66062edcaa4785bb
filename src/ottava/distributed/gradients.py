"""Gradients that travel as FP8 codes: a communication hook for DistributedDataParallel, a reduce-scatter for FSDP2.

Nothing adds in FP8, so no sum can saturate. A rank sends each rank its part of the gradients as E4M3 codes in blocks of
128 (an all-to-all); that rank decodes them, adds in fp32, and casts the sum once more where all ranks want it (an
all-gather). Blocks have scales of their own, so ranks need not agree on one. A block with an infinity or a NaN travels
as E5M2 without a scale, so these arrive where they were, and a loss scaler sees them.
"""

# no `from __future__ import annotations`: DistributedDataParallel compares a hook's annotations with types
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ottava.nn.sharding import all_gather
from ottava.numerics.formats import E4M3
from ottava.numerics.scaling import BLOCK_1X128, exponent_bytes, read_scales
from ottava.numerics.tensor import QuantizationSpec, QuantizedTensor
from ottava.ops.quantize import dequantize, quantize

_SPEC = QuantizationSpec(E4M3, BLOCK_1X128, scale_format="e8m0")
_BLOCK = 128
_NOT_FINITE = 255  # no E8M0 scale: the block's codes are E5M2


def fp8_gradient_hook(
    group: dist.ProcessGroup | None,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # torch's stub leaves it out
) -> torch.futures.Future[Tensor]:
    """The mean of the gradients of all ranks, sent as FP8 codes: for `ddp.register_comm_hook(None, fp8_gradient_hook)`.

    Args:
        group: of the DistributedDataParallel; None: the default one.
        bucket: gradients in float32, bfloat16 or float16.
    Returns:
        The mean, in the bucket's memory and dtype; every rank has the same bits.

    It sends 0.50 of BF16's bytes and 0.25 of fp32's, and rounds twice: each rank's gradients and their sum, by at most
    2**-4 of a number. Where the mean is used many times (no fp32 master, tiny learning rates) measure first.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1, bias=False))
        >>> ddp.register_comm_hook(None, fp8_gradient_hook)
        >>> ddp(torch.tensor([[1.0, 2.0, 3.0, 4.0]])).sum().backward()
        >>> ddp.module.weight.grad
        tensor([[1., 2., 3., 4.]])
        >>> dist.destroy_process_group()
    """
    buffer, ranks = bucket.buffer(), group or dist.group.WORLD
    assert ranks is not None  # a DistributedDataParallel calls this
    side = torch.cuda.Stream(buffer.device) if buffer.is_cuda else None  # so that the backward goes on meanwhile
    if side is not None:
        side.wait_stream(torch.cuda.current_stream(buffer.device))
    with torch.cuda.stream(side):
        _mean_(buffer, ranks)
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)
        future.set_result(buffer)
    return future


def each_gradient_hook(
    group: dist.ProcessGroup | None,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # torch's stub leaves it out
) -> torch.futures.Future[Tensor]:
    """The mean of each gradient, summed by itself: a run that is resumed under DDP has the bits of one that was not.

    The ranks of a ring add the parts of a buffer in different orders, and DistributedDataParallel lays its buffers out
    anew after its first backward. So with three ranks or more, torch's own sum has other last bits in the first step
    after a resume than in the same step of a run without a break.

    Args:
        group: of the DistributedDataParallel; None: the default one.
        bucket: gradients in any dtype.
    Returns:
        The mean, in the bucket's memory and dtype. It sends what torch's own sum does, in one call for each parameter.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1, bias=False))
        >>> ddp.register_comm_hook(None, each_gradient_hook)
        >>> ddp(torch.tensor([[1.0, 2.0, 3.0, 4.0]])).sum().backward()
        >>> ddp.module.weight.grad
        tensor([[1., 2., 3., 4.]])
        >>> dist.destroy_process_group()
    """
    size = dist.get_world_size(group)
    parts = [gradient.div_(size) for gradient in bucket.gradients()]
    sums = [dist.all_reduce(part, group=group, async_op=True).get_future() for part in parts]
    return torch.futures.collect_all(sums).then(lambda _: bucket.buffer())


class FP8ReduceScatter:
    """FSDP2's reduce-scatter, with FP8 codes on the wire: for `module.set_custom_reduce_scatter(FP8ReduceScatter())`.

    It sends 0.50 of BF16's bytes and rounds each rank's gradients once, by at most 2**-4 of a number; the sum has the
    dtype of the reduction (`MixedPrecisionPolicy.reduce_dtype`). The all-reduce over the replicas of an HSDP mesh
    remains torch's.

    Example:
        >>> FP8ReduceScatter().allocate((4,), dtype=torch.bfloat16, device=torch.device("cpu")).shape
        torch.Size([4])
    """

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for FSDP2's buffers."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """output (n,) = sum or mean over ranks of this rank's part of input (ranks * n,).

        Raises:
            ValueError: op is neither SUM nor AVG.
        """
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ValueError(
                f"FP8ReduceScatter: got {op}; needs SUM or AVG. With set_gradient_divide_factor call "
                "module.set_force_sum_reduction_for_comms(True) as well, which divides after the sum"
            )
        ranks = dist.get_world_size(group)
        total = _sum(input_tensor.view(ranks, -1), group)
        output_tensor.copy_(total if op == dist.ReduceOp.SUM else total / ranks)


def _mean_(numbers: Tensor, group: dist.ProcessGroup) -> None:
    ranks = dist.get_world_size(group)
    if not numbers.numel():
        return
    part = -(-numbers.numel() // ranks)
    parts = nn.functional.pad(numbers.view(-1), (0, part * ranks - numbers.numel())).view(ranks, part)
    sent = _packed(_sum(parts, group)[None] / ranks)
    every = sent.new_empty(ranks * sent.numel())
    all_gather(every, sent.view(-1), group)
    numbers.copy_(_unpacked(every.view(ranks, -1), part).reshape(-1)[: numbers.numel()].view_as(numbers))


def _sum(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over ranks of the part that is this rank's: (ranks, n) -> fp32 (n,)."""
    sent = _packed(parts)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return _unpacked(received, parts.shape[1]).sum(0)


def _packed(rows: Tensor) -> Tensor:
    """(R, n) -> uint8 (R, n filled up to whole blocks, and a byte a block)."""
    rows = nn.functional.pad(rows, (0, -rows.shape[1] % _BLOCK))
    cast = quantize(rows, _SPEC)
    blocks = rows.view(rows.shape[0], -1, _BLOCK)
    broken = ~blocks.abs().amax(-1).isfinite()
    codes = cast.data.view(torch.uint8).view(blocks.shape)
    codes = torch.where(broken[..., None], blocks.to(torch.float8_e5m2).view(torch.uint8), codes)
    scales = exponent_bytes(cast.scale_inv).masked_fill_(broken, _NOT_FINITE)
    return torch.cat([codes.flatten(1), scales], 1)


def _unpacked(sent: Tensor, length: int) -> Tensor:
    """The inverse: fp32 (R, length)."""
    count = -(-length // _BLOCK)
    codes, scales = sent[:, : count * _BLOCK].contiguous(), sent[:, count * _BLOCK :]
    broken = scales == _NOT_FINITE
    cast = QuantizedTensor(codes.view(torch.float8_e4m3fn), read_scales(scales), _SPEC, torch.float32)
    numbers, codes = dequantize(cast).view(*scales.shape, _BLOCK), codes.view(*scales.shape, _BLOCK)
    unscaled = codes.view(torch.float8_e5m2).float()
    return torch.where(broken[..., None], unscaled, numbers).flatten(1)[:, :length]
