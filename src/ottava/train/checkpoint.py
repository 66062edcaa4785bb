"""A checkpoint: the whole state of a run in one safetensors file. No pickle, written atomically, checked when read.

    model.<name>               the model's state_dict: parameters as they are stored, and the buffers of the FP8 recipe
    optimizer.<name>.<entry>   the optimizer's states of that parameter and its master, if it has one, as stored
    random.<device>            states of torch's generators
    header                     texts: step, hashes of config and text, versions, a hash of all these and the tensors

The learning rate and the data order are functions of the step, so they need no state. The writer fills a file of
another name, flushes it to the disk and renames it. So a checkpoint exists whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ottava.optim.engine import Engine, widened
from ottava.optim.rules import ADAMW_STATES
from ottava.optim.storage import join
from ottava.weights.checkpoint import infer_spec
from ottava.weights.parameter import QuantizedWeight, adopt_scales

_FORMAT, _BEFORE = "ottava.train.checkpoint/3", "ottava.train.checkpoint/2"
_MOVED = MappingProxyType(
    {".attention_norm.weight": ".attention.qkv_proj.norm.weight", ".mlp_norm.weight": ".mlp.gate_up_proj.norm.weight"}
)
"""Names of the norms' weights in format 2 and in format 3. In format 2 a norm is a layer in front of its linear."""
_NAME = re.compile(r"step-(\d+)(\.safetensors)?")
_TEMPORARY = ".part"
_HASH = "sha256"
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


@contextmanager
def as_checkpoint_error(path: Path) -> Iterator[None]:
    """Turns an error in writing to `path` into a CheckpointError with a remedy."""
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path}: cannot be written ({getattr(error, 'strerror', None) or error}). Earlier checkpoints are whole. "
            "Make room, then continue from the last one with --resume"
        ) from error


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yields a temporary path to write to. When the block ends without an error, the file replaces `path`, on the disk.

    Raises:
        CheckpointError: the file cannot be written. `path` stays as it was, and the temporary file is removed.
    """
    temporary = path.with_name(f".{path.name}{_TEMPORARY}")
    with as_checkpoint_error(path):
        try:
            yield temporary
            with temporary.open("r+b") as stream:
                os.fsync(stream.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    if os.name == "posix":  # other systems cannot open a folder, and need not
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


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
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            # copies: mapped tensors would change if another process wrote to the file
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118  # not a mapping
    except (SafetensorError, OSError) as error:
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
    for entry in folder.glob(f".*{_TEMPORARY}"):
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def high_precision_weights(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """The checkpoint's parameters by name, in the highest precision that it holds.

    A parameter with an FP32 master is that master. A weight with a remainder is joined with it. Others are as stored.
    """
    states = {name.removeprefix("model."): t for name, t in checkpoint.tensors.items() if name.startswith("model.")}
    weights = {}
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
    try:
        report = model.load_state_dict(weights, strict=False)
        states = (".quantizers.", "_scale_inv")  # no parameters: the run starts them anew
        absent = [name for name in report.missing_keys if not any(part in name for part in states)]
        if absent or report.unexpected_keys:
            raise ValueError(f"it lacks {absent}, and the model lacks {report.unexpected_keys}")
    except (RuntimeError, ValueError) as error:
        raise CheckpointError(f"{checkpoint.path}: does not fit this run's model: {error}") from error
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
    entries = {name: widened(state) for name, state in _optimizer_entries(checkpoint).items()}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        needed = _state_names(optimizer, group)
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


def _state_names(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> set[str]:
    """Names of the states that the optimizer keeps of each parameter, without the step count."""
    return {state.name for state in (optimizer.states(group) if isinstance(optimizer, Engine) else ADAMW_STATES)}


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
    states = {name.removeprefix("model."): t for name, t in checkpoint.tensors.items() if name.startswith("model.")}
    try:
        model.load_state_dict(states)
    except (RuntimeError, ValueError) as error:
        raise CheckpointError(f"{checkpoint.path}: does not fit this run's model: {error}") from error
    load_optimizer(checkpoint, model, optimizer, _optimizer_entries(checkpoint))


def _optimizer_entries(checkpoint: Checkpoint) -> dict[str, dict[str, Tensor]]:
    """Name of a parameter -> the entries of its state."""
    entries: dict[str, dict[str, Tensor]] = {}
    for name, tensor in checkpoint.tensors.items():
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
    names = {parameter: name for name, parameter in model.named_parameters()}
    ordered = [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
    state = {index: entries[name] for index, name in enumerate(ordered) if name in entries}
    try:
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    except (RuntimeError, ValueError) as error:
        raise CheckpointError(f"{checkpoint.path}: does not fit this run's model: {error}") from error


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
