"""What a run needs before it starts: its text as bytes, a device, and enough memory.

Every byte is a token, so there is no tokenizer and the loss is in nats per byte.

A batch is a pure function of (seed, step). So a run can resume at any step without a data cursor, and two runs with the
same seed read the same data under any recipe.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from ottava.base.settings import ConfigError
from ottava.base.untrusted import UntrustedError, opened
from ottava.train.config import DataConfig, TrainConfig

# The default text leaves out tests (a third of the library, with many tables), generated tables and other packages.
_NOT_LIBRARY = frozenset(
    {
        "__pycache__",
        "dist-packages",
        "encodings",
        "idle_test",
        "lib2to3",
        "pydoc_data",
        "site-packages",
        "test",
        "tests",
    }
)
_BUILD_DATA = ("_sysconfigdata", "config-")  # these files differ between machines


class DataError(ValueError):
    """The text is missing, empty or too short. The message says what is needed."""

    exit_code = 4


@dataclass(frozen=True)
class ByteCorpus:
    """Text in memory, split into a part for training and a part for validation.

    Example:
        >>> corpus = ByteCorpus.load(DataConfig(max_bytes=100_000))
        >>> inputs, targets = corpus.batch(seed=0, step=7, batch_size=4, length=16)
        >>> inputs.shape, torch.equal(inputs[:, 1:], targets[:, :-1])
        (torch.Size([4, 16]), True)
    """

    train: Tensor
    """uint8 (bytes,)"""
    validation: Tensor
    """uint8 (bytes,)"""
    source: str
    """Name and split of the text, for reports."""

    @classmethod
    def load(cls, config: DataConfig) -> ByteCorpus:
        """Reads the text of the config.

        Validation gets whole files, every 20th of the sorted list for a fraction of 0.05. If they hold less than half
        of the fraction (few files, or one), validation gets the tail of the text instead.

        Raises:
            DataError: the path does not exist, or holds no text.
        """
        if config.path is None:  # every machine with this Python has the same text
            library = _walk(Path(sysconfig.get_path("stdlib")), skip=_NOT_LIBRARY, skip_prefixes=_BUILD_DATA)
            files = [path for path in library if path.suffix == ".py"]
        else:
            files = _walk(config.path) if config.path.is_dir() else [config.path]
            if not config.path.exists():
                raise DataError(f"{config.path}: does not exist; set data.path to a text file or a folder of them")
        # binary files of a folder are skipped; a single file is taken as it is
        texts = list(_read(files, config.max_bytes, skip_binary=files != [config.path]))
        total = sum(map(len, texts))
        if not total:
            where = config.path or "the standard library's folder"
            raise DataError(f"{where}: holds no text; set data.path to a text file or a folder of them")
        stride = round(1 / config.validation_fraction)
        held_out = texts[stride - 1 :: stride]
        if sum(map(len, held_out)) >= total * config.validation_fraction / 2:
            train = [text for index, text in enumerate(texts, start=1) if index % stride]
            split = f"{len(held_out)} whole files held out"
        else:
            whole = b"".join(texts)
            cut = total - max(1, round(total * config.validation_fraction))
            train, held_out = [whole[:cut]], [whole[cut:]]
            split = f"its last {total - cut:,} bytes held out"
        name = "sources of Python's standard library" if config.path is None else str(config.path)
        capped = f", cut at {total:,} bytes (data.max_bytes)" if total == config.max_bytes else ""
        return cls(_tensor(train), _tensor(held_out), f"{name}: {len(texts):,} files{capped}; {split}")

    def require(self, length: int) -> None:
        """Raises DataError if a part of the text is too short for a sequence of `length` bytes and its target."""
        for part, text in (("training", self.train), ("validation", self.validation)):
            if len(text) <= length:
                raise DataError(
                    f"{self.source}: the {part} part has {len(text):,} bytes, but a sequence needs {length + 1:,}; "
                    "give more text, or lower sequence_length or change data.validation_fraction"
                )

    def batch(self, *, seed: int, step: int, batch_size: int, length: int) -> tuple[Tensor, Tensor]:
        """The training batch of a step: windows at random places. Targets lie one byte further.

        Returns:
            inputs and targets, int64 (batch_size, length), on the CPU.
        """
        # Philox is a counter-based generator: its key is its whole state. torch's CPU generator would keep only the low
        # 32 bits of a combined seed.
        random = np.random.Generator(np.random.Philox(key=np.array([seed, step], dtype=np.uint64)))
        starts = torch.from_numpy(random.integers(0, len(self.train) - length, size=batch_size))
        return _windows(self.train, starts, length)

    def validation_batches(self, *, batches: int, batch_size: int, length: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Windows spread evenly over the held-out text, the same for every seed; shapes as in `batch`."""
        starts = torch.linspace(0, len(self.validation) - length - 1, batches * batch_size, dtype=torch.float64).long()
        for part in starts.split(batch_size):
            yield _windows(self.validation, part, length)

    def digest(self) -> str:
        """Hash of all bytes and of the split; equal only for the same text and split."""
        parts = (hashlib.sha256(part.numpy().data).hexdigest() for part in (self.train, self.validation))
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()


def _windows(text: Tensor, starts: Tensor, length: int) -> tuple[Tensor, Tensor]:
    window = text[starts[:, None] + torch.arange(length + 1)].long()  # (batch, length + 1)
    return window[:, :-1], window[:, 1:]


def _tensor(texts: Iterable[bytes]) -> Tensor:
    return torch.from_numpy(np.array(bytearray(b"".join(texts)), dtype=np.uint8))


def _walk(root: Path, skip: frozenset[str] = frozenset(), skip_prefixes: tuple[str, ...] = ()) -> list[Path]:
    """All files below a folder except hidden ones, sorted by path."""

    def is_text(name: str) -> bool:
        return name not in skip and not name.startswith((".", *skip_prefixes))

    def refuse(error: OSError) -> NoReturn:
        raise DataError(f"{error.filename}: cannot be read ({error.strerror})") from error

    files: list[Path] = []
    for folder, below, names in os.walk(root, onerror=refuse):
        below[:] = filter(is_text, below)
        files += [Path(folder, name) for name in filter(is_text, names)]
    return sorted(files, key=lambda file: file.relative_to(root).parts)


def _read(files: Iterable[Path], max_bytes: int | None, *, skip_binary: bool) -> Iterator[bytes]:
    """The bytes of the files, at most max_bytes in all. A file with a zero byte in its first 1,024 bytes is binary."""
    budget = max_bytes
    for file in files:
        if budget == 0:
            return
        try:
            with opened(file) as stream:
                text = stream.read(-1 if budget is None else budget)
        except (OSError, UntrustedError) as error:
            raise DataError(f"{file}: cannot be read ({getattr(error, 'strerror', None) or error})") from error
        if text and not (skip_binary and 0 in text[:1024]):
            budget = None if budget is None else budget - len(text)
            yield text


# --- a device, a text, memory: checked before a run writes anything --------------------------------------------------

_GB = 10**9
_UNKNOWN_MEMORY = 8 * 1024 * _GB
"""Bytes of memory to assume if the system does not report its size."""


class DeviceError(RuntimeError):
    """The config needs hardware that this machine lacks."""

    exit_code = 3


def gather(config: TrainConfig) -> tuple[torch.device, ByteCorpus]:
    """Finds the device and reads the text of the config.

    Raises:
        DeviceError: the machine has no such device.
        DataError: there is no text, or too little.
        ConfigError: the run cannot fit into the device's memory.
    """
    device = find_device(config.device)
    refuse_oversized(config, device)
    corpus = ByteCorpus.load(config.data)
    corpus.require(config.sequence_length)
    return device, corpus


def find_device(name: str) -> torch.device:
    """The device of that name; "auto" is the GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise DeviceError(
            f"device {name!r} does not exist: torch {torch.__version__} sees {torch.cuda.device_count()} CUDA GPUs; "
            "set device=cpu or device=auto"
        )
    return device


def refuse_oversized(config: TrainConfig, device: torch.device) -> None:
    """Raises ConfigError if the run needs more memory than the device has.

    The check is a lower bound: FP32 weights, gradients and AdamW's two moments, the logits of a batch with their
    gradients in FP32, and the places of the validation batches. A run within the bound may still run out of memory.
    """
    needed = 4 * 4 * config.model.parameters + 2 * 4 * 256 * config.batch_size * config.sequence_length
    needed += 8 * config.evaluation.batches * config.batch_size
    memory = _memory(device)
    if needed > memory:
        raise ConfigError(
            f"batch_size {config.batch_size:,}, sequence_length {config.sequence_length:,}, evaluation.batches "
            f"{config.evaluation.batches:,} and a model of {config.model.parameters:,} parameters need more than "
            f"{needed // _GB:,} GB of memory; {device} has {memory // _GB:,} GB. Lower the largest of them"
        )


def _memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    if not hasattr(os, "sysconf"):  # Windows
        return _UNKNOWN_MEMORY
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
