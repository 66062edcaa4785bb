"""The folder of one run: what was asked for, what it ran on, and one line per step.

config.yaml       every setting, as resolved
manifest.json     command, versions, machine, size of the model, what was converted to FP8; every resumption
metrics.jsonl     a `StepRecord` per line, written as the step ends
checkpoints/      see checkpoint.py
receipt.json      what each GEMM really ran, written at the end
"""

from __future__ import annotations

import json
import math
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from ottava.train.checkpoint import CheckpointError, atomic_write
from ottava.train.config import ConfigError, TrainConfig, load_config

MANIFEST_VERSION = 1


@dataclass(frozen=True)
class StepRecord:
    """What one optimizer step was like. Everything but `seconds` is the same in every repetition of a run."""

    step: int
    """Counted from 1."""
    loss: float
    """Training loss in nats per byte, before the update. NaN where it was not finite."""
    grad_norm: float
    """Norm of the whole gradient before clipping. NaN where it was not finite."""
    lr: float
    tokens: int
    """Bytes predicted in this step."""
    seconds: float
    """Time of this step, without evaluation and checkpoints."""
    val_loss: float | None
    """Validation loss in nats per byte after this step's update; None where none was due."""

    def to_json(self) -> str:
        """One line of metrics.jsonl. Floats survive it bit for bit; a NaN, which JSON has no word for, becomes null."""
        values = {
            name: None if isinstance(value, float) and math.isnan(value) else value
            for name, value in asdict(self).items()
        }
        return json.dumps(values, allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> StepRecord:
        """The inverse of `to_json`."""
        values: dict[str, Any] = json.loads(line)
        missing = {name: math.nan for name in ("loss", "grad_norm") if values[name] is None}
        return cls(**(values | missing))


class RunFolder:
    """The files of one run. Opening it decides whether it may be used at all; nothing is written before that.

    Raises:
        ConfigError: the folder is in use and `resume` is False; it is no run's folder; or its run had other settings.
    """

    def __init__(self, path: Path, config: TrainConfig, *, resume: bool) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self._metrics = path / "metrics.jsonl"
        settings = path / "config.yaml"
        if path.exists() and not path.is_dir():
            raise ConfigError(f"{path}: is a file; needed: a folder for the run")
        # A run killed in its first moment leaves a folder with nothing but hidden files.
        used = path.is_dir() and any(not entry.name.startswith(".") for entry in path.iterdir())
        if used and not resume:
            raise ConfigError(f"{path}: is not empty; give another run folder, or continue its run with --resume")
        if used and not settings.exists():
            raise ConfigError(f"{path}: holds no run (no config.yaml in it); give the folder of a run, or an empty one")
        if used:
            _refuse_other_settings(settings, config)
        path.mkdir(parents=True, exist_ok=True)
        self.write("config.yaml", config.to_yaml())

    def write(self, name: str, text: str) -> None:
        """Writes a small file atomically."""
        with atomic_write(self.path / name) as temporary:
            temporary.write_text(text, encoding="utf-8")

    def write_json(self, name: str, values: Mapping[str, Any]) -> None:
        """Writes a small JSON file atomically."""
        self.write(name, json.dumps(values, indent=2) + "\n")

    def write_manifest(self, step: int, facts: Mapping[str, Any]) -> None:
        """Writes manifest.json; where there is one, adds to it that another process took the run over at `step`.

        Args:
            facts: what only the trainer knows; those of the first process stay.
        """
        path = self.path / "manifest.json"
        if path.exists():
            manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            manifest["resumed"].append({"at_step": step, **_this_process()})
        else:
            manifest = {"schema_version": MANIFEST_VERSION, **_this_process(), **facts, "resumed": []}
        self.write_json("manifest.json", manifest)

    def append(self, record: StepRecord) -> None:
        """Adds a step to metrics.jsonl, in one write, so that a killed process leaves at most one torn line."""
        with self._metrics.open("ab", buffering=0) as stream:
            stream.write(f"{record.to_json()}\n".encode())

    def sync(self) -> None:
        """Flushes metrics.jsonl to the disk; done before a checkpoint, which must never know more than it."""
        with self._metrics.open("ab") as stream:
            os.fsync(stream.fileno())

    def cut_history(self, step: int) -> list[StepRecord]:
        """Cuts metrics.jsonl back to its first `step` lines and returns them.

        Raises:
            CheckpointError: it holds fewer, or other, steps.
        """
        lines = self._metrics.read_bytes().splitlines(keepends=True) if self._metrics.exists() else []
        lines = lines[:step]
        try:
            records = [StepRecord.from_json(line.decode()) for line in lines]
        except (ValueError, TypeError, KeyError) as error:
            raise CheckpointError(f"{self._metrics}: has a line that is no step ({error})") from error
        if [record.step for record in records] != list(range(1, step + 1)):
            raise CheckpointError(
                f"{self._metrics}: does not hold steps 1 to {step}, which the checkpoint says were done; "
                "it was changed by hand, or the disk lost it. Start again in another run folder"
            )
        if lines or self._metrics.exists():
            os.truncate(self._metrics, sum(map(len, lines)))
        return records


def _refuse_other_settings(settings: Path, config: TrainConfig) -> None:
    """Raises ConfigError where the saved settings differ in anything that the trained bits depend on."""
    saved = load_config(settings)
    if saved.digest() == config.digest():
        return
    before, now = flatten(saved.model_dump(mode="json")), flatten(config.model_dump(mode="json"))
    changes = [
        f"  {key}: {before.get(key)!r}, now {now.get(key)!r}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key) and not key.startswith(("checkpoint.", "evaluation.", "watch"))
    ]
    raise ConfigError(
        f"{settings}: the run to resume has other settings:\n" + "\n".join(changes) + "\n"
        "a resumed run repeats the uninterrupted one bit for bit, so only checkpoint.*, evaluation.* and watch.* may "
        "change; take the old settings, or start a new run folder"
    )


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A tree of settings as one level.

    Example:
        >>> flatten({"steps": 2, "model": {"layers": 5}})
        {'steps': 2, 'model.layers': 5}
    """
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _this_process() -> dict[str, Any]:
    """Who runs this, and on what."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(sys.argv),
        "versions": {"ottava": version("ottava"), "torch": torch.__version__, "python": platform.python_version()},
        "commit": _commit(),
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
    }


def _commit() -> str | None:
    """The commit that ottava runs from, "-dirty" where changed; None where it was installed from a package."""
    source = Path(__file__)
    git = ["git", "-C", str(source.parent)]
    try:
        # Without the first question, a virtual environment inside somebody's repository would report that one.
        for arguments in (
            ["ls-files", "--error-unmatch", source.name],
            ["describe", "--always", "--dirty", "--abbrev=40"],
        ):
            answer = subprocess.run([*git, *arguments], capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()
