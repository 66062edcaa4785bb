"""The reference trainer behind `ottava train` and `ottava demo`."""

from ottava.train.config import TrainConfig, load_config
from ottava.train.loop import Trainer
from ottava.train.run_folder import StepRecord

__all__ = ["StepRecord", "TrainConfig", "Trainer", "load_config"]
