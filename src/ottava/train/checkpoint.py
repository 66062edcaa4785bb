"""A checkpoint: the whole state of a run. One process writes one safetensors file; several write a folder of them.

    step-000200.safetensors           of one process; its header holds the texts below
    step-000200/shard-*.safetensors   of several, written by torch.distributed.checkpoint; any number of processes reads
    step-000200/ottava.json           the texts, and the sizes and hashes of all files

    model.<name>               the model's state_dict: parameters as they are stored, and the buffers of the FP8 recipe
    optimizer.<name>.<entry>   the optimizer's states of that parameter and its master, if it has one, as stored
    random.<device>            states of torch's generators; random.<rank>.<device> in a folder
    shard.<rank>.<name>...     of a folder: scales of the groups of that rank's moments, for the same division
    texts                      step, hashes of config and text, versions; of a file also a hash of these and the tensors

There is no pickle. In a folder weights have the names and the order of rows of a model in one process, however the
processes split them. The learning rate and the data order are functions of the step, so they need no state. The writer
fills a file or folder of another name, flushes it to the disk and renames it. So a checkpoint exists whole or not at
all.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import time
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.tensor import DTensor, distribute_tensor

from ottava.base.files import replacing, replacing_folder
from ottava.base.text import progress
from ottava.base.untrusted import UntrustedError, file_digest, is_plain, parse_json, read_text, regular_size
from ottava.optim.engine import BOUND, Engine, group_scales, widened
from ottava.optim.rules import ADAMW_STATES
from ottava.optim.storage import join
from ottava.train.ranks import Orders, Ranks
from ottava.weights.checkpoint import infer_spec
from ottava.weights.parameter import QuantizedWeight, adopt_scales, local

_FORMAT, _BEFORE = "ottava.train.checkpoint/3", "ottava.train.checkpoint/2"
_SHARDS = "ottava.train.shards/1"
HEADER = "ottava.json"
_MOVED = MappingProxyType(
    {".attention_norm.weight": ".attention.qkv_proj.norm.weight", ".mlp_norm.weight": ".mlp.gate_up_proj.norm.weight"}
)
"""Names of the norms' weights in format 2 and in format 3. In format 2 a norm is a layer in front of its linear."""
_NAME = re.compile(r"step-(\d+)(\.safetensors)?")
_HASH = "sha256"
_OWN = "shard."
_log = logging.getLogger(__name__)


class CheckpointError(ValueError):
    """A checkpoint cannot be used. The message names the file, the reason and the remedy."""

    exit_code = 4


@dataclass(frozen=True)
class Checkpoint:
    """One readable checkpoint."""

    path: Path
    step: int
    tensors: Mapping[str, Tensor]
    """On the CPU, by the names above."""
    metadata: Mapping[str, str]

    def part(self, prefix: str) -> dict[str, Tensor]:
        """The tensors whose names begin with `prefix`, by the rest of their names."""
        return {name.removeprefix(prefix): t for name, t in self.tensors.items() if name.startswith(prefix)}


@contextmanager
def as_checkpoint_error(path: Path) -> Iterator[None]:
    """Turns an error in writing to `path` into a CheckpointError with a remedy."""
    try:
        yield
    except (SafetensorError, CheckpointException, OSError) as error:
        raise CheckpointError(
            f"{path}: cannot be written ({_cause(error)}). Earlier checkpoints are whole. "
            "Make room, then continue from the last one with --resume"
        ) from error


def _cause(error: BaseException) -> str:
    """The error in one line; torch's own text of an error of several ranks is the tracebacks of all of them."""
    if isinstance(error, CheckpointException):
        rank, (first, _) = next(iter(error.failures.items()))
        return f"rank {rank}: {type(first).__name__}: {str(first).strip().partition(chr(10))[0]}"
    return str(getattr(error, "strerror", None) or error)


@contextmanager
def fitting(path: Path) -> Iterator[None]:
    """Turns an error in loading into a model or an optimizer into a CheckpointError."""
    try:
        yield
    except KeyError as error:
        raise CheckpointError(f"{path}: does not fit this run's model: {error} is missing") from error
    except (RuntimeError, ValueError) as error:
        raise CheckpointError(f"{path}: does not fit this run's model: {error}") from error


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yields a temporary path to write to. When the block ends without an error, the file replaces `path`, on the disk.

    Raises:
        CheckpointError: the file cannot be written. `path` stays as it was, and the temporary file is removed.
    """
    with as_checkpoint_error(path), replacing(path, durable=True) as temporary:
        yield temporary


def save_checkpoint(
    folder: Path, step: int, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], *, keep: int
) -> Path:
    """Writes `step-000200.safetensors` into the folder, and keeps the `keep` newest checkpoints up to that step."""
    folder.mkdir(parents=True, exist_ok=True)
    contents = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    header = {**metadata, "format": _FORMAT, "step": str(step)}
    header[_HASH] = _digest(header, contents)
    path = folder / f"step-{step:06d}.safetensors"
    with atomic_write(path) as temporary:
        save_file(contents, temporary, metadata=header)
    prune(folder, step, keep)
    return path


def prune(folder: Path, step: int, keep: int) -> None:
    """Deletes all but the `keep` newest checkpoints up to that step."""
    for _, old in [entry for entry in checkpoints_in(folder) if entry[0] <= step][keep:]:
        shutil.rmtree(old) if old.is_dir() else old.unlink()


def read_checkpoint(path: Path) -> Checkpoint:
    """Reads and checks one file. Weights of an earlier format get their names of today, and the log says so.

    Raises:
        CheckpointError: the file is missing, cut short, damaged, or no checkpoint of ottava.
    """
    try:
        regular_size(path)
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            # copies: mapped tensors would change if another process wrote to the file
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118  # not a mapping
    except (SafetensorError, OSError, UntrustedError) as error:
        raise CheckpointError(f"{path}: is cut short, damaged or no safetensors file ({error})") from error
    if metadata.get("format") not in (_FORMAT, _BEFORE):
        raise CheckpointError(
            f"{path}: is not a checkpoint of `ottava train` (format {metadata.get('format')!r}; needed: {_FORMAT!r})"
        )
    if metadata.get(_HASH) != _digest(metadata, tensors):
        raise CheckpointError(f"{path}: is damaged: the hash of its header and tensors differs from the hash it states")
    if not metadata.get("step", "").isdecimal():
        raise CheckpointError(f"{path}: has step {metadata.get('step')!r}; needed: a whole number")
    if metadata["format"] == _BEFORE:
        tensors = {_renamed(name): tensor for name, tensor in tensors.items()}
        _log.info("%s: an earlier ottava wrote it; each norm's weight now belongs to the linear behind the norm", path)
    return Checkpoint(path, int(metadata["step"]), tensors, metadata)


def _renamed(name: str) -> str:
    for before, now in _MOVED.items():
        name = name.replace(before, now)
    return name


def remove_temporary_files(folder: Path) -> None:
    """Removes temporary files of a killed process. Only the process that holds the folder may call it."""
    for entry in folder.glob(".*.part"):
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def high_precision_weights(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """The checkpoint's parameters by name, in the highest precision that it holds.

    A parameter with an FP32 master is that master. A weight with a remainder is joined with it. Others are as stored.
    """
    states, weights = checkpoint.part("model."), {}
    for name, weight in states.items():
        master, rest = (checkpoint.tensors.get(f"optimizer.{name}.{entry}") for entry in ("master", "remainder"))
        scale_inv = states.get(f"{name}_scale_inv")
        if master is not None:
            weights[name] = master
        elif rest is not None and scale_inv is not None:
            spec = infer_spec(weight, scale_inv)
            weights[name] = join(QuantizedWeight(weight, adopt_scales(scale_inv, spec), spec, torch.bfloat16), rest)
        elif rest is not None:
            weights[name] = join(weight, rest)
        elif ".quantizers." not in name and not name.endswith("_scale_inv"):
            weights[name] = weight
    return weights


def restore_weights(checkpoint: Checkpoint, model: nn.Module) -> dict[str, Tensor]:
    """Loads only the parameters of the checkpoint into the model: no scaling histories, no optimizer state.

    Returns:
        `high_precision_weights` of the checkpoint.
    Raises:
        CheckpointError: the checkpoint belongs to another model.
    """
    weights = high_precision_weights(checkpoint)
    with fitting(checkpoint.path):
        report = model.load_state_dict(weights, strict=False)
        states = (".quantizers.", "_scale_inv")  # no parameters: the run starts them anew
        absent = [name for name in report.missing_keys if not any(part in name for part in states)]
        if absent or report.unexpected_keys:
            raise ValueError(f"it lacks {absent}, and the model lacks {report.unexpected_keys}")
    return weights


def restore_optimizer(
    checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer, weights: Mapping[str, Tensor]
) -> None:
    """Loads the checkpoint's optimizer states into an optimizer that may store its states in another format.

    Args:
        weights: `high_precision_weights` of the checkpoint; masters start from them.
    Raises:
        CheckpointError: the states are those of another optimizer.
    """
    entries = {name: widened(state) for name, state in _optimizer_entries(checkpoint.tensors).items()}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        needed = {state.name for state in (optimizer.states(group) if isinstance(optimizer, Engine) else ADAMW_STATES)}
        for parameter in group["params"]:
            state = entries.get(names[id(parameter)], {})
            if state and state.keys() - {"step"} != needed:
                raise CheckpointError(
                    f"{checkpoint.path}: holds the states {sorted(state)} of {names[id(parameter)]}, but this run's "
                    f"optimizer needs {sorted(needed)}. Set the same optimizer.name, or carry=weights"
                )
            if state and isinstance(optimizer, Engine):
                state["master"] = weights[names[id(parameter)]].to(torch.float32)
    load_optimizer(checkpoint, model, optimizer, entries)


def collect_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The tensors of a model and its optimizer, by their names in a checkpoint."""
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for entry, value in optimizer.state[parameter].items():
            tensors[f"optimizer.{name}.{entry}"] = value
    return tensors


def restore_state(checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The inverse of `collect_state`.

    Raises:
        CheckpointError: the checkpoint belongs to another model or optimizer.
    """
    with fitting(checkpoint.path):
        model.load_state_dict(checkpoint.part("model."))
    load_optimizer(checkpoint, model, optimizer, _optimizer_entries(checkpoint.tensors))


def _optimizer_entries(tensors: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Name of a parameter -> the entries of its state."""
    entries: dict[str, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        if name.startswith("optimizer."):
            parameter_name, _, entry = name.removeprefix("optimizer.").rpartition(".")
            entries.setdefault(parameter_name, {})[entry] = tensor
    return entries


def load_optimizer(
    checkpoint: Checkpoint,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    entries: Mapping[str, Mapping[str, Tensor]],
) -> None:
    """Loads states into an optimizer.

    Args:
        entries: name of a parameter -> the entries of its state.
    Raises:
        CheckpointError: the states are those of another optimizer.
    """
    state = {i: entries[name] for i, (_, name) in enumerate(_parameters(model, optimizer)) if name in entries}
    with fitting(checkpoint.path):
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[Any, str]]:
    """The parameters of the optimizer in its order, with their names."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [(p, names[id(p)]) for group in optimizer.param_groups for p in group["params"]]


def checkpoints_in(folder: Path) -> list[tuple[int, Path]]:
    """Step and path of all checkpoints, newest first: files of one process, and folders of several."""
    files = ((match, path) for path in folder.glob("step-*") if (match := _NAME.fullmatch(path.name)))
    return sorted(((int(match[1]), path) for match, path in files), reverse=True)


def _digest(header: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    """Hash of the header without its hash, and of the tensors' names, types, shapes and bytes."""
    texts = {name: value for name, value in header.items() if name != _HASH}
    total = hashlib.sha256(json.dumps(texts, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        total.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


# --- of several processes --------------------------------------------------------------------------------------------

Entries = Mapping[str, tuple[torch.Size, torch.dtype]]


def collect_shards(
    model: nn.Module, optimizer: torch.optim.Optimizer, orders: Orders, random: Mapping[str, Tensor], rank: int
) -> dict[str, Any]:
    """This process's part of the run, by its names in a checkpoint; moments in FP32, and their scales beside them."""
    values = {f"model.{name}": value for name, value in model.state_dict().items()}
    names = [name for _, name in _parameters(model, optimizer)]
    for index, state in optimizer.state_dict()["state"].items():
        values |= {f"optimizer.{names[index]}.{entry}": value for entry, value in state.items()}
    for parameter, name in _parameters(model, optimizer):
        if isinstance(parameter, DTensor):
            state, ends = optimizer.state[parameter], (BOUND, *group_scales())
            values |= {f"{_OWN}{rank}.{name}.{key}": local(state[key]) for key in state if key.endswith(ends)}
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
        facts = {**header, "format": _SHARDS, "step": str(step)}
        writer = HuggingFaceStorageWriter(str(part), save_distributed=True)
        if self.group is None:
            with as_checkpoint_error(final):
                save(values, storage_writer=writer)
            self.ranks.together(lambda: self._finish(part, final, facts))
            return final
        pending: Any = async_save(values, storage_writer=writer, process_group=self.group)
        self._pending = pending
        if self.ranks.first:  # a future of its own: who waits for `pending` may go on before its callbacks have run
            finished: Future[None] = Future()
            self._pending = finished

            def finish(done: Future[Any]) -> None:
                try:
                    done.result()
                    self._finish(part, final, facts)
                    finished.set_result(None)
                except BaseException as error:
                    finished.set_exception(error)

            pending.add_done_callback(finish)
        return final

    def wait(self) -> None:
        """Waits until the pending checkpoint is written, if there is one.

        Raises:
            CheckpointError: the checkpoint cannot be written.
        """
        if (pending := self._pending) is not None:
            self._pending = None
            with as_checkpoint_error(self.folder):
                pending.result()
            self.ranks.together(lambda: None)

    def _finish(self, part: Path, final: Path, header: Mapping[str, Any]) -> None:
        if self.ranks.first:
            files = sorted(part.glob("*.safetensors"))
            sizes = {file.name: file.stat().st_size for file in files}
            facts = {**header, "files": sizes, _HASH: dict(zip(sizes, _hashes(files), strict=True))}
            with atomic_write(part / HEADER) as temporary:
                temporary.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
            shutil.rmtree(final, ignore_errors=True)
            os.replace(part, final)
            prune(self.folder, int(header["step"]), self.keep)


def _hashes(files: Sequence[Path]) -> Iterator[str]:
    """SHA-256 of each file; several files at a time."""
    with ThreadPoolExecutor(max_workers=8) as pool:
        yield from pool.map(file_digest, files)


def read_header(path: Path, *, every_byte: bool = True) -> dict[str, Any]:
    """Reads the header of a checkpoint of several processes, and checks that its files are whole.

    Args:
        every_byte: compare the files' hashes, too; checkpoints of earlier versions have none.
    Raises:
        CheckpointError: the folder is no such checkpoint, or a file is missing, or has another size or other bytes.
    """
    try:
        header = parse_json(read_text(path / HEADER))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: is no checkpoint of `ottava train` ({error})") from error
    sound = isinstance(header, dict) and isinstance(header.get("files"), dict)
    if not sound or header.get("format") != _SHARDS or not str(header.get("step", "")).isdecimal():
        raise CheckpointError(f"{path / HEADER}: is damaged, or of another version; needed: format {_SHARDS!r}")
    for name, size in header["files"].items():
        file = path / str(name)
        if not is_plain(name):
            raise CheckpointError(f"{path / HEADER}: names {name!r}, which is no file of this folder")
        if not file.is_file() or file.stat().st_size != size:
            raise CheckpointError(f"{file}: is missing, cut short or damaged; {HEADER} lists it with {size} bytes")
    known = header.get(_HASH)
    if every_byte and isinstance(known, dict):
        files = [path / name for name in header["files"]]
        for file, found in progress(zip(files, _hashes(files), strict=True), "checking files", total=len(files)):
            if known.get(file.name) != found:
                raise CheckpointError(f"{file}: is damaged: its hash differs from the one in {HEADER}")
    return dict(header)


def _whole(path: Path) -> dict[str, Tensor]:
    """All tensors of a folder, whole, in this process alone."""
    entries = _entries(path).items()
    tensors = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in entries if name[:6] != _OWN}
    _load(path, tensors, alone=True)
    first = {name: value for name, value in tensors.items() if not name.startswith("random.")}
    return first | {name.replace(".0.", ".", 1): t for name, t in tensors.items() if name.startswith("random.0.")}


def restore_shards(
    source: Checkpoint,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    orders: Orders,
    rank: int,
    *,
    same_division: bool = False,
) -> dict[str, Tensor]:
    """Fills this process's part of a run from a checkpoint of any number of processes.

    Args:
        same_division: the checkpoint's processes divided the run as these do. Moments then keep their scales, and with
            them their bits; else moments in FP8 are cast anew.
    Returns:
        The states of this process's random generators, if the checkpoint has them.
    Raises:
        CheckpointError: the checkpoint belongs to another model or optimizer, or is damaged.
    """
    folder, tensors = not source.tensors, dict(source.tensors)
    for name, state in _optimizer_entries(tensors).items():  # of one process: codes, whose scales fit no shard
        tensors |= {f"optimizer.{name}.{entry}": value for entry, value in widened(state).items()}
    entries = _entries(source.path) if folder else {n: (t.shape, t.dtype) for n, t in tensors.items()}
    wanted: dict[str, Any] = {f"model.{name}": value for name, value in model.state_dict().items()}
    for parameter, name in _parameters(model, optimizer):
        for entry in (key for key in entries if key.rpartition(".")[0] == f"optimizer.{name}"):
            shape, dtype = entries[entry]
            if not isinstance(parameter, DTensor) or not shape:
                wanted[entry] = torch.empty(shape, dtype=dtype)
            elif shape == parameter.shape:  # group scales fit no other split into shards
                wanted[entry] = torch.empty_like(_plain(parameter.detach()), dtype=dtype)
    prefix = f"random.{rank}." if any(name.startswith(f"random.{rank}.") for name in entries) else "random."
    random = [name for name in entries if name.startswith(prefix) and name.removeprefix(prefix) in ("cpu", "cuda")]
    wanted |= {name: torch.empty(entries[name][0], dtype=torch.uint8) for name in random}
    own = [name for name in entries if same_division and name.startswith(f"{_OWN}{rank}.")]
    wanted |= {name: torch.empty(entries[name][0], dtype=entries[name][1]) for name in own}
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
            _fill(value, tensors[name])
    for name in wanted:
        if (order := _order_of(name, orders)) is not None:
            _fill(_plain(wanted[name]), values[name][order.cpu()])
            values[name] = wanted[name]
    with fitting(source.path):
        model.load_state_dict({name.removeprefix("model."): values[name] for name in values if name[:6] == "model."})
    values |= {name.replace(f"{_OWN}{rank}", "optimizer", 1): values[name] for name in own}
    load_optimizer(source, model, optimizer, _optimizer_entries(values))
    return {name.removeprefix(prefix): values[name] for name in random}


def consolidate(source: Path, target: Path, *, keep: bool) -> dict[str, int]:
    """Writes the tensors of a checkpoint folder as one safetensors file in a new folder.

    Args:
        source: a folder of several processes, of `ottava train` or of torch's HuggingFaceStorageWriter.
        target: a folder that does not exist yet, or is empty.
        keep: write optimizer and random states, too. False: the model alone, by its own names.
    Returns:
        The numbers of "tensors" and of "bytes".
    """
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise CheckpointError(f"{target}: exists; give a new folder")
    if ours := (source / HEADER).exists():
        read_header(source)
    entries = _entries(source)
    chosen = [name for name in entries if not ours or name.startswith("model.") or (keep and name[:6] != _OWN)]
    tensors = {name: torch.empty(entries[name][0], dtype=entries[name][1]) for name in chosen}
    for part in progress([chosen[at::16] for at in range(16) if chosen[at:]], "reading tensors"):
        _load(source, {name: tensors[name] for name in part}, alone=True)
    if ours and not keep:
        tensors = {name.removeprefix("model."): value for name, value in tensors.items()}
    try:
        with replacing_folder(target) as scratch:
            _save(tensors, scratch / "model.safetensors")
    except OSError as error:
        raise CheckpointError(
            f"{target}: cannot be written ({_cause(error)}); make room, or give another one"
        ) from error
    return {"tensors": len(tensors), "bytes": sum(value.nbytes for value in tensors.values())}


def _save(tensors: dict[str, Tensor], file: Path) -> None:
    """Writes one file, alone in its folder; a terminal sees how much of it is written."""
    total = sum(value.nbytes for value in tensors.values()) >> 20
    with ThreadPoolExecutor(1) as writer:
        job = writer.submit(save_file, tensors, file, metadata={"format": "pt"})
        for done in progress(range(total), "writing MiB"):
            while not job.done():
                with suppress(FileNotFoundError):  # it has its own name since a moment ago
                    # of its last size from the start: blocks say what is written
                    if sum(getattr(path.stat(), "st_blocks", 0) for path in file.parent.iterdir()) >> 11 > done:
                        break
                time.sleep(0.02)
        job.result()


def _entries(path: Path) -> Entries:
    if path.is_file():
        raise CheckpointError(f"{path}: is one file already; needs the folder of a checkpoint of several processes")
    if not path.exists():
        raise CheckpointError(f"{path}: does not exist; needs the folder of a checkpoint of several processes")
    if (path / "checkpoints").is_dir():
        raise CheckpointError(f"{path}: is a run folder; give one of the folders in {path / 'checkpoints'}")
    try:
        for file in path.glob("*.safetensors"):
            regular_size(file)
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
        raise CheckpointError(f"{path}: cannot be read, or does not fit this run: {_cause(error)}") from error


def _order_of(name: str, orders: Orders) -> Tensor | None:
    """The order of rows of a fused weight or of its optimizer state; None for other tensors."""
    plain = name.removeprefix("model.") if name.startswith("model.") else name.removeprefix("optimizer.")
    entry = plain.rpartition(".")
    return orders.get(plain, None if entry[2] in ("step", "saved_at") else orders.get(entry[0]))


def _plain(value: Any) -> Any:
    """A DTensor of plain numbers or codes, if the shard is a tensor subclass that holds them; else the value itself."""
    if isinstance(value, DTensor):
        shard: Any = value.to_local()
        held = getattr(shard, "codes", getattr(shard, "numbers", shard))
        if held is not shard:
            whole: dict[str, Any] = {"shape": value.shape, "stride": value.stride()}
            return DTensor.from_local(held, value.device_mesh, value.placements, run_check=False, **whole)
    return value


def _as_whole(value: Any, order: Tensor | None) -> Any:
    value = _plain(value.detach() if isinstance(value, Tensor) else value)
    if order is None:
        return value
    whole = _gathered(value)
    return torch.empty_like(whole).index_copy_(0, order, whole)


def _gathered(value: DTensor) -> Tensor:
    """The whole of a DTensor. Gloo gathers no int16, the dtype of remainders, but these bits under another name."""
    part, known = local(value), value.dtype != torch.int16
    whole: dict[str, Any] = {"shape": value.shape, "stride": value.stride()}
    part = part if known else part.view(torch.float16)
    full = DTensor.from_local(part, value.device_mesh, value.placements, run_check=False, **whole).full_tensor()
    return full if known else full.view(torch.int16)


def _fill(target: Any, whole: Tensor) -> None:
    if isinstance(target, DTensor):
        part = distribute_tensor(whole.to(target.device), target.device_mesh, target.placements, src_data_rank=None)
        local(target).copy_(local(part))
    else:
        target.copy_(whole)


# --- the newest of a run ---------------------------------------------------------------------------------------------


def read_any(path: Path, *, whole: bool = True, every_byte: bool = True) -> Checkpoint:
    """A checkpoint of one process or of several.

    Args:
        whole: read the tensors of a folder, too. False: `restore_shards` reads them later.
        every_byte: compare hashes of a folder's files.
    Raises:
        CheckpointError: the file or folder is damaged, or no checkpoint of ottava.
    """
    if not path.is_dir():
        return read_checkpoint(path)
    header = read_header(path, every_byte=every_byte)
    texts = {name: str(value) for name, value in header.items()}
    return Checkpoint(path, int(header["step"]), _whole(path) if whole else {}, texts)


def newest_checkpoint(folder: Path, *, whole: bool = True) -> tuple[Checkpoint | None, list[str]]:
    """The newest readable checkpoint (None in a folder without any), and the errors of newer ones.

    Raises:
        CheckpointError: there are checkpoints, but none is readable.
    """
    problems: list[str] = []
    for _, path in checkpoints_in(folder):
        try:
            return read_any(path, whole=whole), problems
        except CheckpointError as error:
            problems.append(str(error))
    if problems:
        raise CheckpointError("\n".join([*problems, "there is no older checkpoint; start again in another run folder"]))
    return None, []


def find_checkpoint(source: Path) -> tuple[Checkpoint, list[str]]:
    """The checkpoint `source`, or the newest readable one of the run folder `source`, and the errors of newer ones.

    Raises:
        CheckpointError: there is no checkpoint, or none is readable.
    """
    if not source.exists():
        raise CheckpointError(f"{source}: does not exist; needed: a run folder of `ottava train`, or a checkpoint")
    if not source.is_dir() or (source / HEADER).exists():
        return read_any(source), []
    checkpoint, problems = newest_checkpoint(source / "checkpoints")
    if checkpoint is None:
        raise CheckpointError(f"{source}: holds no checkpoint; needed: a run folder of `ottava train`, or a checkpoint")
    return checkpoint, problems


def whole_checkpoint(source: Path) -> Checkpoint:
    """That of `find_checkpoint`, where no newer one is damaged.

    Raises:
        CheckpointError: as `find_checkpoint`, or the newest one is damaged.
    """
    checkpoint, problems = find_checkpoint(source)
    if problems:
        raise CheckpointError(f"{problems[0]}; the newest that is whole is {checkpoint.path}: name it to take it")
    return checkpoint


def newest_of_run(
    folder: Path, identity: Mapping[str, str], *, whole: bool, older: Collection[str] = ()
) -> Checkpoint | None:
    """The newest readable checkpoint of a run, or None.

    Args:
        identity: hashes of the run, "config" and "text"; the checkpoint must have the same.
        older: further hashes of the config: those of older versions.
    Raises:
        CheckpointError: the checkpoint has another config or text, or no checkpoint is readable.
    """
    checkpoint, problems = newest_checkpoint(folder, whole=whole)
    for problem in problems:
        _log.warning("skipped a checkpoint: %s", problem)
    if checkpoint is None:
        _log.warning("no checkpoint in %s yet: starting from the first step", folder.parent)
        return None
    for name in ("config", "text"):
        if checkpoint.metadata.get(name) not in (identity[name], *(older if name == "config" else ())):
            raise CheckpointError(
                f"{checkpoint.path}: comes from a run with another {name}, so this run cannot continue it. "
                f"Restore that {name}, or start again in another run folder"
            )
    return checkpoint
