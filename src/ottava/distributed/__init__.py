"""Many processes on torch's own engine: FP8 under `parallelize_module`, FSDP2 and DDP; what is sent; do ranks agree?"""

import inspect

from ottava.distributed.fsdp import fully_shard as fully_shard
from ottava.distributed.gradients import FP8ReduceScatter as FP8ReduceScatter
from ottava.distributed.gradients import each_gradient_hook as each_gradient_hook
from ottava.distributed.gradients import fp8_gradient_hook as fp8_gradient_hook
from ottava.distributed.styles import ColwiseParallel as ColwiseParallel
from ottava.distributed.styles import ContextParallel as ContextParallel
from ottava.distributed.styles import ExpertParallel as ExpertParallel
from ottava.distributed.styles import PrepareInput as PrepareInput
from ottava.distributed.styles import RowwiseParallel as RowwiseParallel
from ottava.distributed.styles import SequenceParallel as SequenceParallel
from ottava.distributed.styles import tensor_parallel_plan as tensor_parallel_plan
from ottava.distributed.verify import verify as verify
from ottava.engine.groups import Collectives as Collectives

__all__ = sorted(name for name, one in globals().items() if name[0] != "_" and not inspect.ismodule(one))
