"""The processes of a run: who they are, what they agree on, and how an error of one ends all of them."""

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

from ottava.distributed import verify
from ottava.settings import ConfigError
from ottava.train.config import ParallelConfig

T = TypeVar("T")
SPLITS = ("pp", "dp", "cp", "shard", "tp")
"""Settings whose product is the number of processes. `ep` divides replicas, which are dp x cp."""
_DIMS = ("pp", "replicas", "shard", "tp")


class RankError(RuntimeError):
    """Another process of the run failed, or the processes differ. The message names it."""

    exit_code = 5


class Ranks:
    """The processes of a run; one process alone is its own first, and every sum is what it has.

    Args:
        config: how they share the run. Their number is that of torch.distributed, if it was started.
        device: of this process.
    Raises:
        ConfigError: there are more or fewer of them.
    """

    def __init__(self, config: ParallelConfig, device: torch.device) -> None:
        started = dist.is_available() and dist.is_initialized()
        self.size, self.rank = (dist.get_world_size(), dist.get_rank()) if started else (1, 0)
        self.config, self.device = config, device
        if self.size != config.processes:
            split = " x ".join(f"{name} {getattr(config, name)}" for name in SPLITS)
            there = "there is one process" if self.size == 1 else f"there are {self.size} processes"
            raise ConfigError(
                f"parallel asks for {config.processes} processes ({split}), and {there}. Set parallel.dp, for example, "
                f"or start it with: torchrun --nproc-per-node {config.processes} -m ottava train ..."
            )
        self.mesh: DeviceMesh | None = None
        self.context: DeviceMesh | None = None
        """The processes that share this one's sequences, if it holds parts of them."""
        self.experts: DeviceMesh | None = None
        """The processes among which its experts are divided; `copies` is the group of those that hold the same ones."""
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
        """Whether this process writes what one process writes."""
        return self.rank == 0

    def place(self, name: str) -> int:
        """This process's place along a dimension of the mesh."""
        return 0 if self.mesh is None else self.mesh.get_local_rank(name)

    @property
    def reader(self) -> int:
        """Which part of a batch this process reads, of `readers`."""
        return self.place("replicas") // self.config.cp * self.config.shard + self.place("shard")

    @property
    def part_of_sequences(self) -> int:
        """Which part of its sequences this process reads, of `config.cp`."""
        return self.place("replicas") % self.config.cp

    @property
    def readers(self) -> int:
        """How many parts a batch has."""
        return self.config.dp * self.config.shard

    def rows(self, whole: Tensor) -> Tensor:
        """This process's part of a batch."""
        return whole.chunk(self.readers)[self.reader].chunk(self.config.cp, 1)[self.part_of_sequences]

    def together(self, make: Callable[[], T]) -> T:
        """make() in all processes; if it fails in one, it fails in all.

        Raises:
            RankError: where it went well, with the error of the first process that failed.
        """
        error: Exception | None = None
        try:
            made = make()
        except Exception as caught:
            error = caught
        said = enumerate(self.tell(None if error is None else str(error)))
        failed = next(((rank, text) for rank, text in said if text is not None), None)
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
        said = self.tell(dict(facts))
        for rank, other in enumerate(said):
            for name in dict.fromkeys((*said[0], *other)):
                if said[0].get(name) != other.get(name):
                    raise RankError(
                        f"{name} differs: rank 0 has {said[0].get(name)!r}, rank {rank} has {other.get(name)!r}. Give "
                        "all processes the same command, the same files and the same installation"
                    )

    def compare(self, model: nn.Module) -> None:
        """Whether all processes hold one model.

        Raises:
            RankError: it names the first thing that differs, a rank, and both values.
        """

        def agree() -> None:
            try:
                verify(model, self.of_stage)
            except RuntimeError as error:
                raise RankError(str(error)) from error

        if self.size > 1:
            self.together(agree)

    def any(self, flag: bool) -> bool:
        """Whether it holds in one of the processes."""
        return self.sum(torch.tensor(float(flag))) > 0

    def sum(self, value: Tensor) -> float:
        """Over all processes, in double precision, so that the order of ordinary losses changes no bit."""
        total = value.detach().to(torch.float64)
        if self.size > 1:
            dist.all_reduce(total)
        return float(total)

    def mean(self, loss: Tensor) -> float:
        """Of a loss that the last stage of the pipeline has, and 0 in the others."""
        return self.sum(loss) * self.config.pp / self.size

    def everything(self, parts: list[T]) -> list[T]:
        """What the stages of the pipeline have, one after the other."""
        if self.config.pp == 1 or self.mesh is None:
            return parts
        said: list[list[T]] = [[]] * self.config.pp
        dist.all_gather_object(said, parts, group=self.mesh.get_group("pp"))
        return [one for stage in said for one in stage]

    def tell(self, value: T) -> list[T]:
        """What each process has, to all."""
        said: list[T] = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(said, value)
        return said

    def clip(self, parameters: Iterable[nn.Parameter], most: float) -> Tensor:
        """Scales gradients with a larger norm down to that norm; returns the norm, of all shards and stages."""
        owned = [parameter for parameter in parameters if parameter.grad is not None]
        if self.size == self.config.replicas and self.experts is None:  # every process has all gradients
            return nn.utils.clip_grad_norm_(owned, most)
        square = torch.zeros((), dtype=torch.float64, device=self.device)
        for parameter in owned:
            holders = self.size // self.config.pp // _shards(parameter.grad)
            square += local(parameter.grad).double().square().sum() / holders
        dist.all_reduce(square)
        norm = square.sqrt().float()
        torch._foreach_mul_([local(p.grad) for p in owned], (most / (norm + 1e-6)).clamp(max=1.0))
        return norm


def local(tensor: Any) -> Tensor:
    """What this process holds of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _shards(tensor: Any) -> int:
    if not isinstance(tensor, DTensor):
        return 1
    places = enumerate(tensor.placements)
    return math.prod(tensor.device_mesh.size(dim) for dim, place in places if not place.is_replicate())
