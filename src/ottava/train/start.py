"""Starts a run from another run's weights, or in its middle; recipe and storage may change."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ottava.base.settings import ConfigError
from ottava.engine.state import ScalingState
from ottava.nn.calibrate import calibrate
from ottava.train.checkpoint import Checkpoint, restore_optimizer, restore_weights
from ottava.train.config import TrainConfig
from ottava.train.from_llama import is_weights, read_weights
from ottava.train.newest import find_checkpoint
from ottava.train.run_folder import StepRecord

_CALIBRATION_BATCHES = 16  # a whole window of the registered recipes
_log = logging.getLogger(__name__)

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Start:
    """The state that a run took from another run."""

    step: int
    """Optimizer steps that count as done."""
    records: list[StepRecord]
    """Records of these steps, if the other run's folder holds them all."""
    facts: dict[str, Any]
    """Entries for the manifest."""


def start_from(
    config: TrainConfig,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaling: ScalingState,
    batch: Callable[[int], Batch],
    loss_of: Callable[[nn.Module, Batch], Tensor],
) -> Start:
    """Loads the parts of `config.init` that `config.carry` names, calibrates predicted scales, and logs both.

    Raises:
        CheckpointError: there is no readable checkpoint, or it does not fit the model or optimizer.
        ConfigError: the checkpoint has done all steps of this run already.
    """
    assert config.init is not None
    continues = config.carry == "optimizer"
    if alone := is_weights(config.init):
        if continues:
            raise ConfigError(f"{config.init}: holds weights alone, without states of an optimizer; take carry=weights")
        checkpoint, problems = read_weights(config.init, config.model), list[str]()
    else:
        checkpoint, problems = find_checkpoint(config.init)
    for problem in problems:
        _log.warning("skipped a checkpoint: %s", problem)
    weights = restore_weights(checkpoint, model)
    if continues:
        if checkpoint.step >= config.steps:
            raise ConfigError(
                f"{checkpoint.path}: is of step {checkpoint.step}, but this run ends at steps={config.steps}; set more"
            )
        restore_optimizer(checkpoint, model, optimizer, weights)
        _log.info(
            "continues from step %d of %s with its weights, optimizer states and step count, but without its scaling "
            "histories; masters start from its weights in the highest precision that it holds",
            checkpoint.step,
            checkpoint.path,
        )
    elif alone:
        _log.info("starts from the weights of %s; FP8 codes among them are decoded to FP32", checkpoint.path)
    else:
        _log.info(
            "starts from the weights of %s (step %d), without its optimizer states, scaling histories and step count",
            checkpoint.path,
            checkpoint.step,
        )
    step = checkpoint.step if continues else 0
    batches = _CALIBRATION_BATCHES if scaling.predicts else 0
    if batches:
        calibrate(model, map(batch, range(step + 1, step + batches + 1)), loss=loss_of)
        scaling.take_amax()  # drop the amaxes of calibration
        _log.info("calibrated the predicted scales on the first %d batches, in high precision", batches)
    if config.rewarm:
        _log.info("the learning rate rises to its schedule in %d steps", config.rewarm)
    facts = {"from": str(checkpoint.path), "step": checkpoint.step, "calibration_batches": batches}
    facts |= {"carried": ["weights", "optimizer", "step"] if continues else ["weights"]}
    return Start(step, _records(checkpoint) if continues else [], facts)


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
