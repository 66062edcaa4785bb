"""Where FP8 hurts: statistics of every tensor at the door where it is cast."""

from ottava.debug.analysis.compare import compare
from ottava.debug.analysis.diagnose import diagnose
from ottava.debug.analysis.what_if import predict
from ottava.debug.history import replay
from ottava.debug.observer import Observation, observe
from ottava.debug.recording import read_series
from ottava.debug.remedy.bisect import bisect
from ottava.debug.remedy.fallback import Fallback, by_fork, by_gradient
from ottava.debug.remedy.guard import SpikeGuard
from ottava.debug.run.reader import Run
from ottava.debug.slots import Slots
from ottava.debug.state_file import read_scaling_state
from ottava.debug.statistics import STATISTICS, Statistic
from ottava.debug.watch.config import WatchConfig
from ottava.debug.watch.dumps import read_dump, save_batch

__all__ = [
    "STATISTICS",
    "Fallback",
    "Observation",
    "Run",
    "Slots",
    "SpikeGuard",
    "Statistic",
    "WatchConfig",
    "bisect",
    "by_fork",
    "by_gradient",
    "compare",
    "diagnose",
    "observe",
    "predict",
    "read_dump",
    "read_scaling_state",
    "read_series",
    "replay",
    "save_batch",
]
