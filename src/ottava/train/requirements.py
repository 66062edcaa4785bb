"""What a run needs from its surroundings: a device, a text, memory. Asked for before anything is written."""

from __future__ import annotations

import os

import torch

from ottava.settings import ConfigError
from ottava.train.config import TrainConfig
from ottava.train.data import ByteCorpus

_GB = 10**9
_UNKNOWN_MEMORY = 8 * 1024 * _GB
"""Bytes that are taken to be there where the system does not say how many are."""


class DeviceError(RuntimeError):
    """The config asks for hardware that is not here."""

    exit_code = 3


def gather(config: TrainConfig) -> tuple[torch.device, ByteCorpus]:
    """The device and the text that the config names.

    Raises:
        DeviceError: no such device.
        DataError: no text, or too little.
        ConfigError: the run cannot fit into the device's memory.
    """
    device = find_device(config.device)
    refuse_what_cannot_fit(config, device)
    corpus = ByteCorpus.load(config.data)
    corpus.require(config.sequence_length)
    return device, corpus


def find_device(wanted: str) -> torch.device:
    """The device of that name; "auto" is the GPU where there is one."""
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(wanted)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise DeviceError(
            f"device {wanted!r} is not here: torch {torch.__version__} sees {torch.cuda.device_count()} CUDA GPUs; "
            "set device=cpu or device=auto"
        )
    return device


def refuse_what_cannot_fit(config: TrainConfig, device: torch.device) -> None:
    """Raises ConfigError where the run needs more memory than the device has.

    A lower bound: FP32 weights, gradients and AdamW's two moments, the logits of a batch with their gradients in FP32,
    and the places of the validation batches. What fits by this bound may still run out of memory.
    """
    needed = 4 * 4 * config.model.parameters + 2 * 4 * 256 * config.batch_size * config.sequence_length
    needed += 8 * config.evaluation.batches * config.batch_size
    there = _memory(device)
    if needed > there:
        raise ConfigError(
            f"batch_size {config.batch_size:,}, sequence_length {config.sequence_length:,}, evaluation.batches "
            f"{config.evaluation.batches:,} and a model of {config.model.parameters:,} parameters need more than "
            f"{needed // _GB:,} GB of memory; {device} has {there // _GB:,} GB. Lower what is too large"
        )


def _memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    if not hasattr(os, "sysconf"):  # Windows
        return _UNKNOWN_MEMORY
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
