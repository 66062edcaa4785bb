"""Records the amaxes of a run in a file, one line per optimizer step, for `history` to replay.

    RUN/amax.jsonl    {"schema_version": 1, "tensors": [{"layer": ..., "tensor": ..., "format": ..., ...}, ...]}
                      {"step": 1, "amax": [2.5, 0.013, 0]}          one number per tensor, 0 = idle
                      ...

Each line is one write: a killed process leaves at most one torn line, and readers ignore it. A resumed run cuts the
file back to the step of its checkpoint. Numbers have nine digits, enough for the exact fp32 number.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ottava.base.errors import RefusesUnknownFields, need_known
from ottava.base.untrusted import opened, parse_json
from ottava.numerics.formats import Format, get_format
from ottava.numerics.scaling import ScaleFormat
from ottava.numerics.tensor import QuantizationSpec

SCHEMA_VERSION = 1
FILE_NAME = "amax.jsonl"
_ALGORITHMS = ("max", "most_recent")


class RecordingError(ValueError):
    """A recording cannot be read; the message names the file, the reason, and what to do."""

    exit_code = 4


@dataclass(frozen=True)
class Setting(RefusesUnknownFields):
    """How a scale is predicted. A `QuantizationSpec` has fields of the same names.

    Raises:
        ValueError: amax_history_len or amax_compute_algo has no such value.

    Example:
        >>> str(Setting(16, "max", 1)), str(Setting(1, "most_recent"))
        ('L=16, max, margin 1', 'most_recent, margin 0')
    """

    amax_history_len: int
    """Length of the window in optimizer steps."""
    amax_compute_algo: str = "max"
    """"max" of the window, or "most_recent", which ignores the length."""
    margin: int = 0
    """Octaves of headroom."""

    def __post_init__(self) -> None:
        if self.amax_history_len < 1:
            raise ValueError(f"Setting: amax_history_len is {self.amax_history_len}; needs 1 or more steps")
        need_known("Setting", "amax_compute_algo", self.amax_compute_algo, _ALGORITHMS)

    @property
    def reach(self) -> int:
        """Number of earlier amaxes that decide the scale."""
        return self.amax_history_len if self.amax_compute_algo == "max" else 1

    def __str__(self) -> str:
        window = f"L={self.amax_history_len}, max" if self.amax_compute_algo == "max" else "most_recent"
        return f"{window}, margin {self.margin}"


@dataclass(frozen=True)
class RecordedTensor:
    """One tensor of a recording and its cast."""

    layer: str
    """Full name of the layer."""
    tensor: str
    """input, weight or grad_output."""
    format: Format
    """Number format."""
    scale_format: ScaleFormat = "fp32"
    """Format of its scale."""
    guard_bits: int = 3
    """`guarded` keeps a predicted scale that puts the amax at most so many octaves below the largest number."""
    setting: Setting | None = None
    """The run's own setting; None if it is unknown or a function."""

    @classmethod
    def of(cls, layer: str, tensor: str, spec: QuantizationSpec) -> RecordedTensor:
        """The entry of a tensor whose casts follow `spec`."""
        algorithm = spec.amax_compute_algo
        setting = None if callable(algorithm) else Setting(spec.amax_history_len, algorithm, spec.margin)
        return cls(layer, tensor, spec.format, spec.scale_format, spec.guard_bits, setting)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**asdict(self), "format": self.format.name}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RecordedTensor:
        """The inverse of `to_dict`. Only layer, tensor and format must be there."""
        setting = Setting(**values["setting"]) if values.get("setting") else None
        return cls(**{**values, "format": get_format(values["format"]), "setting": setting})


@dataclass(frozen=True, eq=False)
class Recording:
    """The amaxes of a run.

    Example:
        >>> Recording.of({"fc1.input": ("E4M3", [1.0, 0.0, 4.0])}).amax.shape
        torch.Size([3, 1])
    """

    tensors: tuple[RecordedTensor, ...]
    """The T tensors."""
    steps: tuple[int, ...]
    """Numbers of the S optimizer steps, ascending."""
    amax: Tensor
    """fp32 (S, T); 0 where the tensor was not cast in that step."""

    @classmethod
    def of(cls, series: Mapping[str, tuple[str, Sequence[float]]]) -> Recording:
        """A recording of your own numbers: "layer.tensor" -> (format name, amax of every step; 0 = idle).

        Raises:
            ValueError: unknown format, series of different lengths, or an amax that is negative or not finite.
        """
        names = [name.rpartition(".") for name in series]
        tensors = [RecordedTensor(n[0], n[2], get_format(f)) for n, (f, _) in zip(names, series.values(), strict=True)]
        lengths = {len(values) for _, values in series.values()}
        if len(lengths) > 1:
            raise ValueError(
                f"Recording: got series of {sorted(lengths)} steps; needs one length for all, with 0 for idle steps"
            )
        amax = torch.tensor([list(values) for _, values in series.values()], dtype=torch.float32).reshape(
            len(tensors), -1
        )
        if not bool(((amax >= 0) & amax.isfinite()).all()):
            raise ValueError("Recording: an amax is negative or not finite; needs 0 where a tensor was idle")
        return cls(tuple(tensors), tuple(range(1, amax.shape[1] + 1)), amax.t().contiguous())

    @property
    def setting(self) -> Setting | None:
        """The run's own setting; None if tensors differ in it or it is unknown."""
        settings = {tensor.setting for tensor in self.tensors}
        return settings.pop() if len(settings) == 1 else None


class AmaxLog:
    """Writes the file of a run.

    Args:
        run_dir: the folder; it exists.
        step: the optimizer step from which the run goes on. Lines of later steps are removed.
        digest: the hash that the file must then have; None: any.

    Raises:
        RecordingError: the file is damaged.

    Example:
        >>> import tempfile, ottava
        >>> spec = ottava.RECIPES["delayed"].fprop.lhs
        >>> with tempfile.TemporaryDirectory() as run:
        ...     log = AmaxLog(run)
        ...     log.append(1, [("fc1", "input", spec, 2.5)])         # what ScalingState.take_amax() gives
        ...     read_series(run).amax
        tensor([[2.5000]])
    """

    def __init__(self, run_dir: Path | str, *, step: int = 0, digest: str | None = None) -> None:
        self.path = Path(run_dir) / FILE_NAME
        self._header: list[RecordedTensor] | None = None
        self._doors: list[tuple[str, str, QuantizationSpec]] = []
        self._digest = hashlib.sha256()
        if self.path.exists():
            self._cut_back(step, digest)

    @property
    def digest(self) -> str:
        """Hash of the file. A checkpoint keeps it: the lines have no checksum."""
        return self._digest.hexdigest()

    def append(self, step: int, amaxes: Sequence[tuple[str, str, QuantizationSpec, float]]) -> None:
        """Adds the amaxes of a step: (layer, tensor, spec, amax) of every tensor with a predicted scale.

        Raises:
            ValueError: the tensors differ from those of earlier steps, or an amax is negative or not finite.
        """
        if not amaxes:
            return
        values = [amax for *_, amax in amaxes]
        if not all(math.isfinite(value) and value >= 0 for value in values):
            raise ValueError(f"{self.path}: an amax of step {step} is negative or not finite; needs 0 for idle tensors")
        lines = [f'{{"step": {step}, "amax": [{", ".join(f"{value:.9g}" for value in values)}]}}']
        doors = [(layer, tensor, spec) for layer, tensor, spec, _ in amaxes]
        if doors != self._doors:
            tensors = [RecordedTensor.of(*door) for door in doors]
            if self._header is None:
                header = {"schema_version": SCHEMA_VERSION, "tensors": [tensor.to_dict() for tensor in tensors]}
                lines.insert(0, json.dumps(header))
            elif tensors != self._header:
                raise ValueError(
                    f"{self.path}: step {step} has other tensors or settings than earlier steps, so the model or its "
                    "recipe changed; record it in another folder"
                )
            self._header, self._doors = tensors, doors
        data = "".join(f"{line}\n" for line in lines).encode()
        self._digest.update(data)
        with self.path.open("ab") as stream:
            stream.write(data)

    def _cut_back(self, step: int, digest: str | None) -> None:
        lines = _whole_lines(self.path)
        header = next(lines, None)
        length = 0
        if header is not None and step > 0:
            self._header = _tensors(self.path, header)
            length = len(header)
            self._digest.update(header)
            for number, line in enumerate(lines, start=2):
                if _step(self.path, number, line, len(self._header))[0] > step:
                    break
                length += len(line)
                self._digest.update(line)
        if digest not in (None, self.digest):
            raise RecordingError(
                f"{self.path}: is not what it was when the checkpoint of step {step} was written: a number was edited, "
                "or the disk damaged the file. Restore the file, or start again in another run folder"
            )
        os.truncate(self.path, length)


def recorded(run_dir: Path) -> Recording | None:
    """The recording of a run; None if the folder has none."""
    return read_series(run_dir) if (run_dir / FILE_NAME).is_file() else None


def read_series(run_dir: Path | str) -> Recording:
    """The recording of a run.

    Raises:
        RecordingError: the folder has no recording, or a damaged one.
    Edge cases: a torn last line is ignored; steps may be missing but must ascend.

    Example: see `AmaxLog`.
    """
    path = Path(run_dir) / FILE_NAME
    if not path.is_file():
        raise RecordingError(
            f"{path}: does not exist; only runs whose recipe predicts scales (recipe=delayed, recipe=guarded) record it"
        )
    lines = _whole_lines(path)
    header = next(lines, None)
    if header is None:
        raise RecordingError(f"{path}: is empty; record some steps first")
    tensors = _tensors(path, header)
    steps: list[int] = []
    rows: list[Tensor] = []
    for number, line in enumerate(lines, start=2):
        step, values = _step(path, number, line, len(tensors))
        if steps and step <= steps[-1]:
            raise RecordingError(
                f"{path}: line {number} is step {step}, after step {steps[-1]}; somebody edited the file"
            )
        row = torch.tensor(values, dtype=torch.float32)
        if not bool(((row >= 0) & row.isfinite()).all()):
            raise RecordingError(f"{path}: line {number} has an amax that is negative or not finite")
        steps.append(step)
        rows.append(row)
    amax = torch.stack(rows) if rows else torch.zeros(0, len(tensors), dtype=torch.float32)
    return Recording(tuple(tensors), tuple(steps), amax)


def _whole_lines(path: Path) -> Iterator[bytes]:
    with opened(path) as stream:
        for line in stream:
            if line.endswith(b"\n"):  # a killed process leaves a torn line
                yield line


def _tensors(path: Path, header: bytes) -> list[RecordedTensor]:
    try:
        values = parse_json(header)
        version = values["schema_version"]
        tensors = [RecordedTensor.from_dict(entry) for entry in values["tensors"]] if version == SCHEMA_VERSION else []
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise RecordingError(f"{path}: its first line is not the header of a recording ({error})") from error
    if version != SCHEMA_VERSION:
        raise RecordingError(f"{path}: has schema_version {version!r}; this ottava reads {SCHEMA_VERSION}")
    return tensors


def _step(path: Path, number: int, line: bytes, tensors: int) -> tuple[int, list[float]]:
    try:
        values = parse_json(line)
        step, amax = int(values["step"]), [float(value) for value in values["amax"]]
    except (ValueError, TypeError, KeyError) as error:
        raise RecordingError(f"{path}: line {number} is no step of a recording ({error})") from error
    if len(amax) != tensors:
        raise RecordingError(f"{path}: line {number} has {len(amax)} numbers for the {tensors} tensors of the header")
    return step, amax
