"""Finds the checkpoint that a run continues from: a file of one process, or a folder of several."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from pathlib import Path

from ottava.train.checkpoint import Checkpoint, CheckpointError, checkpoints_in, read_checkpoint
from ottava.train.shards import HEADER, read_header, read_whole

_log = logging.getLogger(__name__)


def read_any(path: Path, *, whole: bool = True) -> Checkpoint:
    """A checkpoint of one process or of several.

    Args:
        whole: read the tensors of a folder, too. False: `restore_shards` reads them later.
    Raises:
        CheckpointError: the file or folder is damaged, or no checkpoint of ottava.
    """
    if not path.is_dir():
        return read_checkpoint(path)
    if whole:
        return read_whole(path)
    header = read_header(path)
    return Checkpoint(path, int(header["step"]), {}, {name: str(value) for name, value in header.items()})


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
    """The checkpoint `source`, or the newest readable checkpoint of the run folder `source`.

    Returns:
        The checkpoint, and the errors of newer ones, as from `newest_checkpoint`.
    Raises:
        CheckpointError: there is no checkpoint, or none is readable.
    """
    if not source.exists():
        raise CheckpointError(f"{source}: does not exist; needed: a run folder of `ottava train`, or a checkpoint")
    checkpoint: Checkpoint | None
    problems: list[str] = []
    if source.is_dir() and not (source / HEADER).exists():
        checkpoint, problems = newest_checkpoint(source / "checkpoints")
    else:
        checkpoint = read_any(source)
    if checkpoint is None:
        raise CheckpointError(f"{source}: holds no checkpoint; needed: a run folder of `ottava train`, or a checkpoint")
    return checkpoint, problems


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
