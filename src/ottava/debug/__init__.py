"""Where FP8 hurts: statistics of every tensor at the door where it is cast."""

from ottava.debug.history import replay
from ottava.debug.observer import Observation, observe
from ottava.debug.recording import read_series
from ottava.debug.run.reader import Run
from ottava.debug.state_file import read_scaling_state
from ottava.debug.statistics import STATISTICS, Statistic
from ottava.debug.watch.config import WatchConfig

__all__ = [
    "STATISTICS",
    "Observation",
    "Run",
    "Statistic",
    "WatchConfig",
    "observe",
    "read_scaling_state",
    "read_series",
    "replay",
]
