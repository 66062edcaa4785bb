"""The processes of a run: their ranks, the facts that they compare, and errors that end all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from ottava.base.settings import ConfigError
from ottava.distributed import verify
from ottava.train.config import ParallelConfig

T = TypeVar("T")
SPLITS = ("pp", "dp", "cp", "shard", "tp")
"""Settings whose product is the number of processes. `ep` divides replicas, which are dp x cp."""
_DIMS = ("pp", "replicas", "shard", "tp")


class RankError(RuntimeError):
    """Another process of the run failed, or the processes differ. The message names it."""

    exit_code = 5


class Ranks:
    """The processes of a run. A process alone has rank 0, and every sum is its own value.

    Args:
        config: how the processes share the run. Without torch.distributed there is one process.
        device: the device of this process.
    Raises:
        ConfigError: the config wants another number of processes.
    """

    def __init__(self, config: ParallelConfig, device: torch.device) -> None:
        started = dist.is_available() and dist.is_initialized()
        self.size, self.rank = (dist.get_world_size(), dist.get_rank()) if started else (1, 0)
        self.config, self.device = config, device
        if self.size != config.processes:
            split = " x ".join(f"{name} {getattr(config, name)}" for name in SPLITS)
            there = "there is one process" if self.size == 1 else f"there are {self.size} processes"
            raise ConfigError(
                f"parallel needs {config.processes} process{'es' * (config.processes > 1)} ({split}), but {there}. Set "
                "parallel.dp, for example, or start the run with: torchrun --nproc-per-node "
                f"{config.processes} -m ottava train ..."
            )
        self.mesh: DeviceMesh | None = None
        self.context: DeviceMesh | None = None
        """The processes that share the sequences of this process; None if it holds whole sequences."""
        self.experts: DeviceMesh | None = None
        """The processes that share the experts. `copies` is the group of processes that hold the same experts."""
        if self.size > 1:
            self.mesh = init_device_mesh(
                device.type, tuple(getattr(config, name) for name in _DIMS), mesh_dim_names=_DIMS
            )
            store = dist.distributed_c10d._get_default_store()
            self.run = store.add(f"ottava/runs of {self.rank}", 1)  # a process may have several runs, one after another
            self.of_stage = self.mesh["replicas", "shard", "tp"]._flatten("stage").get_group()
            groups = [*self.mesh.get_all_groups(), self.of_stage, None]
            if config.cp > 1:
                sizes = config.pp * config.dp, config.cp, config.shard * config.tp
                self.context = init_device_mesh(device.type, sizes, mesh_dim_names=("_", "cp", "__"))["cp"]
                groups.append(self.context.get_group())
            if config.ep > 1:
                sizes = config.pp, config.replicas // config.ep, config.ep
                mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("_", "copies", "ep"))
                self.experts, self.copies = mesh["ep"], mesh["copies"].get_group()
                groups += [self.experts.get_group(), self.copies]
            for group in groups:
                dist.distributed_c10d._set_pg_timeout(timedelta(seconds=config.timeout), group)

    @property
    def first(self) -> bool:
        """Whether this process has rank 0, which writes the files of the run."""
        return self.rank == 0

    def place(self, name: str) -> int:
        """This process's place along a dimension of the mesh."""
        return 0 if self.mesh is None else self.mesh.get_local_rank(name)

    @property
    def reader(self) -> int:
        """The part of a batch that this process reads: 0 to `readers` - 1."""
        return self.place("replicas") // self.config.cp * self.config.shard + self.place("shard")

    @property
    def part_of_sequences(self) -> int:
        """The part of its sequences that this process reads: 0 to `config.cp` - 1."""
        return self.place("replicas") % self.config.cp

    @property
    def readers(self) -> int:
        """The number of parts of a batch."""
        return self.config.dp * self.config.shard

    def rows(self, whole: Tensor) -> Tensor:
        """This process's part of a batch."""
        return whole.chunk(self.readers)[self.reader].chunk(self.config.cp, 1)[self.part_of_sequences]

    def together(self, make: Callable[[], T]) -> T:
        """Calls make() in all processes and returns its result. If it fails in one process, all processes raise.

        Raises:
            RankError: make() failed in another process; the message quotes the first of them.
            Exception: make() failed in this process; its own error.
        """
        error: Exception | None = None
        try:
            made = make()
        except Exception as caught:
            error = caught
        messages = enumerate(self.tell(None if error is None else str(error)))
        failed = next(((rank, text) for rank, text in messages if text is not None), None)
        if error is None and failed is not None:
            raise RankError(f"rank {failed[0]} has stopped: {failed[1]}")
        if error is not None:
            raise error
        return made

    def agree(self, facts: Mapping[str, Any]) -> None:
        """Compares settings and versions.

        Raises:
            RankError: in all processes; it names the first rank that differs from rank 0, the fact, and both values.
        """
        first, *others = self.tell(dict(facts))
        for rank, other in enumerate(others, start=1):
            for name in dict.fromkeys((*first, *other)):
                if first.get(name) != other.get(name):
                    raise RankError(
                        f"{name} differs: rank 0 has {first.get(name)!r}, rank {rank} has {other.get(name)!r}. Give "
                        "all processes the same command, the same files and the same installation"
                    )

    def compare(self, model: nn.Module) -> None:
        """Checks that all processes hold the same model.

        Raises:
            RankError: they do not. The message names the first difference, a rank, and both values.
        """

        def agree() -> None:
            try:
                verify(model, self.of_stage)
            except RuntimeError as error:
                raise RankError(str(error)) from error

        if self.size > 1:
            self.together(agree)

    def any(self, flag: bool) -> bool:
        """Whether the flag is True in one of the processes."""
        return self.sum(torch.tensor(float(flag))) > 0

    def sum(self, value: Tensor) -> float:
        """The sum over all processes, in double precision: the order of ordinary losses then changes no bit."""
        total = value.detach().to(torch.float64)
        if self.size > 1:
            dist.all_reduce(total)
        return float(total)

    def mean(self, loss: Tensor) -> float:
        """The mean over the processes with the last pipeline stage. The others must give 0."""
        return self.sum(loss) * self.config.pp / self.size

    def everything(self, parts: list[T]) -> list[T]:
        """The parts of all pipeline stages, in the order of the stages."""
        if self.config.pp == 1 or self.mesh is None:
            return parts
        stages: list[list[T]] = [[]] * self.config.pp
        dist.all_gather_object(stages, parts, group=self.mesh.get_group("pp"))
        return [part for stage in stages for part in stage]

    def tell(self, value: T) -> list[T]:
        """Sends this process's value to all processes, and returns the values of all, in the order of ranks."""
        values: list[T] = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value)
        return values

    def clip(self, parameters: Iterable[nn.Parameter], most: float) -> Tensor:
        """Scales the gradients down if their norm exceeds `most`. Returns the norm before that, over all shards."""
        trained = [parameter for parameter in parameters if parameter.grad is not None]
        if self.size == self.config.replicas and self.experts is None:  # every process has all gradients
            return nn.utils.clip_grad_norm_(trained, most)
        square = torch.zeros((), dtype=torch.float64, device=self.device)
        for parameter in trained:
            holders = self.size // self.config.pp // _shards(parameter.grad)
            square += local(parameter.grad).double().square().sum() / holders
        dist.all_reduce(square)
        norm = square.sqrt().float()
        torch._foreach_mul_([local(p.grad) for p in trained], (most / (norm + 1e-6)).clamp(max=1.0))
        return norm


def local(tensor: Any) -> Tensor:
    """This process's part of a DTensor; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _shards(tensor: Any) -> int:
    """The number of different parts that a tensor is split into."""
    if not isinstance(tensor, DTensor):
        return 1
    places = enumerate(tensor.placements)
    return math.prod(tensor.device_mesh.size(dim) for dim, place in places if not place.is_replicate())
