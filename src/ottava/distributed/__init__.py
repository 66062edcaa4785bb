"""Many processes on torch's own engine: FP8 under `parallelize_module`, FSDP2 and DDP; what is sent; do ranks agree?"""

from ottava.distributed.fsdp import fully_shard
from ottava.distributed.gradients import FP8ReduceScatter, each_gradient_hook, fp8_gradient_hook
from ottava.distributed.styles import (
    ColwiseParallel,
    ContextParallel,
    ExpertParallel,
    PrepareInput,
    RowwiseParallel,
    SequenceParallel,
    tensor_parallel_plan,
)
from ottava.distributed.verify import verify
from ottava.engine.groups import Collectives

__all__ = [
    "Collectives",
    "ColwiseParallel",
    "ContextParallel",
    "ExpertParallel",
    "FP8ReduceScatter",
    "PrepareInput",
    "RowwiseParallel",
    "SequenceParallel",
    "each_gradient_hook",
    "fp8_gradient_hook",
    "fully_shard",
    "tensor_parallel_plan",
    "verify",
]
