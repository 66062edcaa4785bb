"""The requirements of a run: a device, a text, memory. The trainer checks them before it writes anything."""

from __future__ import annotations

import os

import torch

from ottava.base.settings import ConfigError
from ottava.train.config import TrainConfig
from ottava.train.data import ByteCorpus

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
