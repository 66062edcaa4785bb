"""A checkpoint of several processes: each writes its part into one folder, and any number of processes can read it.

    step-000200/shard-*.safetensors   written by torch.distributed.checkpoint, without pickle: names as in checkpoint.py
    step-000200/ottava.json           step, hashes of config and text, versions, and the sizes of all files

Weights have the names and the order of rows of a model in one process, however the processes split them. The folder has
a hidden name until all its files are written, so a checkpoint exists whole or not at all.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.tensor import DTensor, distribute_tensor

from ottava.base.files import replacing
from ottava.base.untrusted import parse_json, read_text
from ottava.train.checkpoint import Checkpoint, CheckpointError, atomic_write, load_optimizer, prune
from ottava.train.parallel import Orders
from ottava.train.ranks import Ranks, local

HEADER = "ottava.json"
_FORMAT = "ottava.train.shards/1"
Entries = Mapping[str, tuple[torch.Size, torch.dtype]]


def collect_shards(
    model: nn.Module, optimizer: torch.optim.Optimizer, orders: Orders, random: Mapping[str, Tensor], rank: int
) -> dict[str, Any]:
    """This process's part of the run, by its names in a checkpoint; moments in FP32."""
    values = {f"model.{name}": value for name, value in model.state_dict().items()}
    names = [name for _, name in _parameters(model, optimizer)]
    for index, state in optimizer.state_dict()["state"].items():
        values |= {f"optimizer.{names[index]}.{entry}": value for entry, value in state.items()}
    values |= {f"random.{rank}.{name}": state for name, state in random.items()}
    return {name: _as_whole(value, _order_of(name, orders)) for name, value in values.items()}


class ShardWriter:
    """Writes the checkpoints of a run with several processes.

    Args:
        folder: the folder of all checkpoints.
        keep: how many of the newest checkpoints to keep.
        asynchronous: `save` returns before the files are written.
    """

    def __init__(self, folder: Path, ranks: Ranks, *, keep: int, asynchronous: bool) -> None:
        self.folder, self.ranks, self.keep = folder, ranks, keep
        # a group of its own: collectives of a checkpoint run while those of training do
        self.group = dist.new_group(backend="gloo") if asynchronous else None
        self._pending: Future[Any] | None = None

    def save(self, step: int, values: dict[str, Any], header: Mapping[str, str]) -> Path:
        """Writes `step-000200/` and returns its path."""
        self.wait()
        final = self.folder / f"step-{step:06d}"
        part = self.folder / f".{final.name}.part"

        def clear() -> None:
            if self.ranks.first:
                shutil.rmtree(part, ignore_errors=True)
                part.mkdir(parents=True)

        self.ranks.together(clear)
        facts = {**header, "format": _FORMAT, "step": str(step)}
        writer = HuggingFaceStorageWriter(str(part), save_distributed=True)
        if self.group is None:
            self._checked(final, lambda: save(values, storage_writer=writer))
            self.ranks.together(lambda: self._finish(part, final, facts))
            return final
        pending: Any = async_save(values, storage_writer=writer, process_group=self.group)
        self._pending = pending
        if self.ranks.first:

            def finish(done: Future[Any]) -> None:
                if done.exception() is None:
                    self._finish(part, final, facts)

            pending.add_done_callback(finish)
        return final

    def wait(self) -> None:
        """Waits until the pending checkpoint is written, if there is one.

        Raises:
            CheckpointError: the checkpoint cannot be written.
        """
        if (pending := self._pending) is not None:
            self._pending = None
            self._checked(self.folder, pending.result)
            self.ranks.together(lambda: None)

    def _checked(self, path: Path, write: Any) -> None:
        try:
            write()
        except (CheckpointException, OSError) as error:
            raise CheckpointError(
                f"{path}: cannot be written ({error}). Earlier checkpoints are whole. Make room, then continue from "
                "the last one with --resume"
            ) from error

    def _finish(self, part: Path, final: Path, header: Mapping[str, Any]) -> None:
        if self.ranks.first:
            sizes = {file.name: file.stat().st_size for file in sorted(part.glob("*.safetensors"))}
            with atomic_write(part / HEADER) as temporary:
                temporary.write_text(json.dumps({**header, "files": sizes}, indent=2) + "\n", encoding="utf-8")
            shutil.rmtree(final, ignore_errors=True)
            os.replace(part, final)
            prune(self.folder, int(header["step"]), self.keep)


def read_header(path: Path) -> dict[str, Any]:
    """Reads the header of a checkpoint of several processes, and checks that its files are whole.

    Raises:
        CheckpointError: the folder is no such checkpoint, or a file is missing or has another size.
    """
    try:
        header = parse_json(read_text(path / HEADER))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: is no checkpoint of `ottava train` ({error})") from error
    sound = isinstance(header, dict) and isinstance(header.get("files"), dict)
    if not sound or header.get("format") != _FORMAT or not str(header.get("step", "")).isdecimal():
        raise CheckpointError(f"{path / HEADER}: is damaged, or of another version; needed: format {_FORMAT!r}")
    for name, size in header["files"].items():
        file = path / str(name)
        if not file.is_file() or file.stat().st_size != size:
            raise CheckpointError(f"{file}: is missing, cut short or damaged; {HEADER} lists it with {size} bytes")
    return dict(header)


def read_whole(path: Path) -> Checkpoint:
    """The checkpoint with all tensors whole, in this process alone."""
    header = read_header(path)
    tensors = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in _entries(path).items()}
    _load(path, tensors, alone=True)
    first = {name: value for name, value in tensors.items() if not name.startswith("random.")}
    first |= {name.replace(".0.", ".", 1): t for name, t in tensors.items() if name.startswith("random.0.")}
    return Checkpoint(path, int(header["step"]), first, {name: str(value) for name, value in header.items()})


def restore_shards(
    source: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer, orders: Orders, rank: int
) -> dict[str, Tensor]:
    """Fills this process's part of a run from a checkpoint of any number of processes.

    Returns:
        The states of this process's random generators, if the checkpoint has them.
    Raises:
        CheckpointError: the checkpoint belongs to another model or optimizer, or is damaged.
    """
    folder = not source.tensors
    entries = _entries(source.path) if folder else {n: (t.shape, t.dtype) for n, t in source.tensors.items()}
    wanted: dict[str, Any] = {f"model.{name}": value for name, value in model.state_dict().items()}
    for parameter, name in _parameters(model, optimizer):
        for entry in (key for key in entries if key.rpartition(".")[0] == f"optimizer.{name}"):
            shape, dtype = entries[entry]
            if shape == parameter.shape:
                wanted[entry] = torch.empty_like(_plain(parameter.detach()), dtype=dtype)
            elif not isinstance(parameter, DTensor) or not shape:  # group scales fit no other split into shards
                wanted[entry] = torch.empty(shape, dtype=dtype)
    prefix = f"random.{rank}." if any(name.startswith(f"random.{rank}.") for name in entries) else "random."
    random = [name for name in entries if name.startswith(prefix) and name.removeprefix(prefix) in ("cpu", "cuda")]
    wanted |= {name: torch.empty(entries[name][0], dtype=torch.uint8) for name in random}
    if lacking := [name for name in wanted if name not in entries]:
        raise CheckpointError(f"{source.path}: does not fit this run's model: it lacks {', '.join(lacking[:3])}")
    values = {
        name: _plain(value) if _order_of(name, orders) is None else torch.empty(value.shape, dtype=value.dtype)
        for name, value in wanted.items()
    }
    if folder:
        _load(source.path, values)
    else:
        for name, value in values.items():
            _fill(value, source.tensors[name])
    for name in wanted:
        if (order := _order_of(name, orders)) is not None:
            _fill(_plain(wanted[name]), values[name][order.cpu()])
            values[name] = wanted[name]
    try:
        model.load_state_dict({name.removeprefix("model."): values[name] for name in values if name[:6] == "model."})
    except (RuntimeError, ValueError) as error:
        raise CheckpointError(f"{source.path}: does not fit this run's model: {error}") from error
    states: dict[str, dict[str, Any]] = {}
    for name in values:
        if name.startswith("optimizer."):
            parameter_name, _, entry = name.removeprefix("optimizer.").rpartition(".")
            states.setdefault(parameter_name, {})[entry] = values[name]
    load_optimizer(source, model, optimizer, states)
    return {name.removeprefix(prefix): values[name] for name in random}


def consolidate(source: Path, target: Path, *, keep: bool) -> dict[str, int]:
    """Writes the tensors of a checkpoint folder as one safetensors file in a new folder.

    Args:
        source: a folder of several processes, of `ottava train` or of torch's HuggingFaceStorageWriter.
        target: a folder that does not exist yet.
        keep: write optimizer and random states, too. False: the model alone, by its own names.
    Returns:
        The numbers of "tensors" and of "bytes".
    """
    from safetensors.torch import save_file

    if target.exists():
        raise CheckpointError(f"{target}: exists; give a new folder")
    if ours := (source / HEADER).exists():
        read_header(source)
    entries = _entries(source)
    chosen = [name for name in entries if keep or not ours or name.startswith("model.")]
    tensors = {name: torch.empty(entries[name][0], dtype=entries[name][1]) for name in chosen}
    _load(source, tensors, alone=True)
    target.mkdir(parents=True)
    if ours and not keep:
        tensors = {name.removeprefix("model."): value for name, value in tensors.items()}
    with replacing(target / "model.safetensors") as temporary:
        save_file(tensors, temporary, metadata={"format": "pt"})
    return {"tensors": len(tensors), "bytes": sum(value.nbytes for value in tensors.values())}


def _entries(path: Path) -> Entries:
    if path.is_file():
        raise CheckpointError(f"{path}: is one file already; needs the folder of a checkpoint of several processes")
    if (path / "checkpoints").is_dir():
        raise CheckpointError(f"{path}: is a run folder; give one of the folders in {path / 'checkpoints'}")
    try:
        metadata = HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata
    except Exception as error:  # the errors of safetensors, json and the file system have no common class
        raise CheckpointError(f"{path}: cannot be read: a file of it is damaged ({error})") from error
    if not metadata:
        raise CheckpointError(f"{path}: holds no safetensors files, as several processes of `ottava train` write them")
    return {name: (entry.size, entry.properties.dtype) for name, entry in metadata.items()}  # type: ignore[union-attr]


def _load(path: Path, values: dict[str, Any], *, alone: bool = False) -> None:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # `alone` wants that
            load(values, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=alone)
    except (CheckpointException, OSError, ValueError, RuntimeError, AssertionError) as error:
        raise CheckpointError(f"{path}: cannot be read, or does not fit this run: {error}") from error


def _parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[Any, str]]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [(p, names[id(p)]) for group in optimizer.param_groups for p in group["params"]]


def _order_of(name: str, orders: Orders) -> Tensor | None:
    """The order of rows of a fused weight or of its optimizer state; None for other tensors."""
    plain = name.removeprefix("model.") if name.startswith("model.") else name.removeprefix("optimizer.")
    entry = plain.rpartition(".")
    return orders.get(plain, None if entry[2] == "step" else orders.get(entry[0]))


def _plain(value: Any) -> Any:
    """A DTensor of plain numbers, if the shard is a tensor subclass that holds them; else the value itself."""
    if isinstance(value, DTensor) and hasattr(shard := value.to_local(), "numbers"):
        whole: dict[str, Any] = {"shape": value.shape, "stride": value.stride()}
        return DTensor.from_local(shard.numbers, value.device_mesh, value.placements, run_check=False, **whole)
    return value


def _as_whole(value: Any, order: Tensor | None) -> Any:
    value = _plain(value.detach() if isinstance(value, Tensor) else value)
    if order is None:
        return value
    whole = value.full_tensor()
    return torch.empty_like(whole).index_copy_(0, order, whole)


def _fill(target: Any, whole: Tensor) -> None:
    if isinstance(target, DTensor):
        part = distribute_tensor(whole.to(target.device), target.device_mesh, target.placements, src_data_rank=None)
        local(target).copy_(local(part))
    else:
        target.copy_(whole)
