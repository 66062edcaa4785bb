"""The processes of a run: their ranks, the facts that they compare, and errors that end all of them."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from ottava.base.settings import ConfigError
from ottava.distributed import verify
from ottava.train.config import ParallelConfig
from ottava.weights.parameter import local

T = TypeVar("T")
Orders = Mapping[str, Tensor]
"""Name of a fused weight -> the order in which tensor-parallel processes hold the rows of the whole weight."""
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
        return self.sum(torch.tensor(float(flag), dtype=torch.float32)) > 0

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
            with connected():
                dist.all_gather_object(values, value)
        return values

    def clip(self, parameters: Iterable[nn.Parameter], most: float) -> Tensor:
        """Scales the gradients down if their norm exceeds `most`. Returns the norm before that, over all shards.

        Squares are summed in FP64 with any number of processes, so a run goes on with the same norm on another number.
        """
        trained = [parameter for parameter in parameters if parameter.grad is not None]
        whole = self.size == self.config.replicas and self.experts is None  # every process has all gradients
        gradients = [local(p.grad) for p in trained]
        square = torch.zeros((), dtype=torch.float64, device=self.device)
        if gradients:
            holders = [1 if whole else self.size // self.config.pp // _shards(p.grad) for p in trained]
            squares = torch.stack(torch._foreach_norm(gradients, 2, torch.float64)).square()
            square += (squares / torch.tensor(holders, dtype=torch.float64, device=self.device)).sum()
        if not whole:
            dist.all_reduce(square)
        norm = square.sqrt().float()
        if gradients:
            torch._foreach_mul_(gradients, (most / (norm + 1e-6)).clamp(max=1.0))
        return norm


def _shards(tensor: Any) -> int:
    """The number of different parts that a tensor is split into."""
    if not isinstance(tensor, DTensor):
        return 1
    places = enumerate(tensor.placements)
    return math.prod(tensor.device_mesh.size(dim) for dim, place in places if not place.is_replicate())


# --- what failed, and where ------------------------------------------------------------------------------------------

# torch's error of a failed collective names only an address. So each process writes a note of its place into the run's
# store, reads the notes of the others, and names the rank, the layer and the difference.
PATIENCE = 10.0
"""Seconds that a failed process waits for the notes of the others."""
_WIRE = ("gloo", "nccl", "connection", "timed out", "timeout", "socket", "tcpstore", "broken pipe")


@contextmanager
def explained(ranks: Ranks, model: nn.Module, moment: Callable[[], str]) -> Iterator[None]:
    """Explains an error in the block by the notes of all processes.

    Args:
        moment: returns the time for the message, such as "step 7".
    Raises:
        RankError: a collective failed. The message names the rank that failed, is silent, or waited elsewhere.
    """
    try:
        yield
    except Exception as error:
        if ranks.size == 1 or isinstance(error, RankError):
            raise
        is_local = not _is_lost_connection(error)
        note = {"place": f"{moment()}, {_place(error.__traceback__, model)}"}
        note |= {"failed": f"{type(error).__name__}: {_first_line(error)}"} if is_local else {}
        notes = _exchange(ranks, note)
        if is_local:
            raise
        raise RankError(f"{_story(ranks.rank, notes)}. torch says: {_first_line(error)}") from error


@contextmanager
def connected() -> Iterator[None]:
    """Turns the error of a collective in the block, whose other process is gone, into a RankError."""
    try:
        yield
    except Exception as error:
        if hasattr(error, "exit_code") or not _is_lost_connection(error):  # else: a sentence already
            raise
        raise RankError(
            f"another process of the run is gone, or does not answer: {_first_line(error)}. Look for its error, "
            "then start all processes again with --resume"
        ) from error


def _is_lost_connection(error: Exception) -> bool:
    told = isinstance(error, dist.DistError) or isinstance(error.__cause__, dist.DistError)
    return told or any(word in str(error).lower() for word in _WIRE)


def _exchange(ranks: Ranks, note: dict[str, str]) -> list[dict[str, str] | None]:
    """Writes this process's note and reads those of the others; None for a silent process."""
    notes: list[dict[str, str] | None] = [None] * ranks.size
    notes[ranks.rank] = note
    deadline = time.monotonic() + PATIENCE
    with suppress(RuntimeError):  # the process that held the store is gone
        store = dist.distributed_c10d._get_default_store()
        store.set(f"ottava/fault/{ranks.run}/{ranks.rank}", json.dumps(note))
        for rank in range(ranks.size):
            seconds = max(0.1, deadline - time.monotonic())
            with suppress(RuntimeError):
                store.wait([f"ottava/fault/{ranks.run}/{rank}"], timedelta(seconds=seconds))
                notes[rank] = json.loads(store.get(f"ottava/fault/{ranks.run}/{rank}"))
    return notes


def _story(reader: int, notes: list[dict[str, str] | None]) -> str:
    """The failure in one sentence, for the process of rank `reader`."""
    here = notes[reader]
    assert here is not None
    others = [(rank, note) for rank, note in enumerate(notes) if rank != reader]
    if failed := [
        f"rank {rank} failed ({note['place']}): {note['failed']}" for rank, note in others if note and "failed" in note
    ]:
        return f"{failed[0]}; rank {reader} waited for it ({here['place']})"
    if silent := [str(rank) for rank, note in others if note is None]:
        gone = f"rank {silent[0]}" if len(silent) == 1 else f"ranks {', '.join(silent)}"
        return f"{gone} did not answer: killed, or busy elsewhere; rank {reader} waited ({here['place']})"
    if apart := [(rank, note) for rank, note in others if note and note["place"] != here["place"]]:
        rank, note = apart[0]
        return (
            f"rank {reader} waited ({here['place']}), and rank {rank} did not come: it waited elsewhere "
            f"({note['place']}). All processes must run the same layers in the same order"
        )
    place = here["place"]
    return f"all processes waited at the same place ({place}): the network failed, or parallel.timeout is too short"


def _place(trace: TracebackType | None, model: nn.Module) -> str:
    """The phase, the layer and the collective of an error, from its traceback."""
    names: dict[int, str] = {id(module): name for name, module in model.named_modules()}
    names |= {id(module.quantizers): name for name, module in model.named_modules() if hasattr(module, "quantizers")}
    layer, collective, phase = "", "", "forward"
    while trace is not None:
        frame, trace = trace.tb_frame, trace.tb_next
        values = [frame.f_locals.get(name) for name in ("self", "module", "layer", "call")]
        for value in values:
            module_name = names.get(id(value)) or names.get(id(getattr(value, "doors", None)))
            layer = module_name or getattr(value, "_module_fqn", None) or layer
        if frame.f_code.co_name in ("backward", "_engine_run_backward"):
            phase = "backward"
        if frame.f_code.co_filename.endswith("distributed_c10d.py") and not collective:
            name = frame.f_code.co_name
            collective = "" if name == "wrapper" else name
    where = f"{phase} of {layer}" if layer else phase if phase == "backward" else "outside of layers"
    return f"{where}, in {collective}" if collective else where


def explain_divergence(ranks: Ranks, model: nn.Module, run: Callable[[], Any]) -> str:
    """Names the first module with an output that is not finite, for each process that has one.

    Args:
        run: repeats the forward.
    """
    names = ranks.tell(first_not_finite(model, run))
    lines = [
        f"rank {rank}: the output of {name} is the first that is not finite" for rank, name in enumerate(names) if name
    ]
    return "; ".join(lines) or "all outputs are finite, but a gradient is not"


def first_not_finite(model: nn.Module, run: Callable[[], Any]) -> str:
    """The name of the first module whose output is not finite in `run`; "" if there is none."""
    names: list[str] = []

    def look(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if not names and isinstance(output, Tensor) and not bool(output.isfinite().all()):
            names.append(name)

    with ExitStack() as stack, torch.no_grad():
        for name, module in model.named_modules():
            if name:
                stack.enter_context(module.register_forward_hook(partial(look, name)))
        run()
    return names[0] if names else ""


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0]
