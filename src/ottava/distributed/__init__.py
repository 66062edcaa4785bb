"""Many processes on torch's own engine: FP8 under `parallelize_module`, and a check that ranks agree."""

from ottava.distributed.shard import fully_shard
from ottava.distributed.styles import (
    ColwiseParallel,
    ExpertParallel,
    PrepareInput,
    RowwiseParallel,
    SequenceParallel,
    tensor_parallel_plan,
)
from ottava.distributed.verify import verify

__all__ = [
    "ColwiseParallel",
    "ExpertParallel",
    "PrepareInput",
    "RowwiseParallel",
    "SequenceParallel",
    "fully_shard",
    "tensor_parallel_plan",
    "verify",
]
