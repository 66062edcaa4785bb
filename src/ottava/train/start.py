"""How a run starts from another one: from its weights, or in its middle, under another recipe or other storage."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ottava.nn.calibrate import calibrate
from ottava.settings import ConfigError
from ottava.state import ScalingState
from ottava.train.checkpoint import Checkpoint, restore_optimizer, restore_weights
from ottava.train.config import TrainConfig
from ottava.train.newest import find_checkpoint
from ottava.train.run_folder import StepRecord

_CALIBRATION_BATCHES = 16  # a whole window of the registered recipes
_log = logging.getLogger(__name__)

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Start:
    """What a run took over."""

    step: int
    """Optimizer steps that count as done."""
    records: list[StepRecord]
    """Of these steps, as far as the other run's folder has them."""
    facts: dict[str, Any]
    """For the manifest."""


def start_from(
    config: TrainConfig,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaling: ScalingState,
    batch: Callable[[int], Batch],
    loss_of: Callable[[nn.Module, Batch], Tensor],
) -> Start:
    """Loads what `config.carry` says of `config.init`, calibrates predicted scales, and logs what was carried over.

    Raises:
        CheckpointError: there is no readable checkpoint, or it does not fit.
        ConfigError: the other run has done all steps of this one.
    """
    assert config.init is not None
    checkpoint, problems = find_checkpoint(config.init)
    for problem in problems:
        _log.warning("skipped a checkpoint: %s", problem)
    weights = restore_weights(checkpoint, model)
    goes_on = config.carry == "optimizer"
    if goes_on:
        if checkpoint.step >= config.steps:
            raise ConfigError(
                f"{checkpoint.path}: is of step {checkpoint.step}, and this run has steps={config.steps}; needs more"
            )
        restore_optimizer(checkpoint, model, optimizer, weights)
        _log.info(
            "goes on from step %d of %s with its weights, optimizer states and step count, without its scaling "
            "histories; masters are FP32 or what optimizer.master makes of it",
            checkpoint.step,
            checkpoint.path,
        )
    else:
        _log.info(
            "starts from the weights of %s (step %d), without its optimizer state, scaling histories and step count",
            checkpoint.path,
            checkpoint.step,
        )
    step = checkpoint.step if goes_on else 0
    batches = _CALIBRATION_BATCHES if scaling.predicts else 0
    if batches:
        calibrate(model, map(batch, range(step + 1, step + batches + 1)), loss=loss_of)
        scaling.take_amax()  # drop the amaxes of calibration
        _log.info("calibrated the predicted scales on the first %d batches, in high precision", batches)
    if config.rewarm:
        _log.info("the learning rate rises to its schedule in %d steps", config.rewarm)
    facts = {"from": str(checkpoint.path), "step": checkpoint.step, "calibration_batches": batches}
    facts |= {"carried": ["weights", "optimizer", "step"] if goes_on else ["weights"]}
    return Start(step, _records(checkpoint) if goes_on else [], facts)


def _records(checkpoint: Checkpoint) -> list[StepRecord]:
    """The steps of the other run, if the checkpoint lies in its folder."""
    path = checkpoint.path.parent.parent / "metrics.jsonl"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()[: checkpoint.step]
        records = [StepRecord.from_json(line) for line in lines]
    except (OSError, ValueError, TypeError, KeyError) as error:
        _log.warning("%s: cannot be read (%s): the curve of this run begins at its own first step", path, error)
        return []
    return records if [record.step for record in records] == list(range(1, checkpoint.step + 1)) else []
