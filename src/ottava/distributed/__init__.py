"""Many processes on torch's own engine: FP8 under `parallelize_module`, and a check that ranks agree."""

from torch.distributed.tensor.parallel import SequenceParallel

from ottava.distributed.sharded_weight import fully_shard
from ottava.distributed.styles import ColwiseParallel, PrepareInput, RowwiseParallel
from ottava.distributed.verify import verify

__all__ = ["ColwiseParallel", "PrepareInput", "RowwiseParallel", "SequenceParallel", "fully_shard", "verify"]
