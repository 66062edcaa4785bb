"""The debugger's public names: measure every cast, find which one hurts the run, repair it."""

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ottava.base import first_use

if TYPE_CHECKING:  # for type checkers what _HOMES is for Python
    from ottava.diagnose.compare import compare
    from ottava.diagnose.diagnose import diagnose
    from ottava.diagnose.history import replay
    from ottava.diagnose.what_if import predict
    from ottava.experiments.bisect import bisect
    from ottava.interop.contents import read_scaling_state
    from ottava.measure.observer import Observation, Slots, observe
    from ottava.measure.statistics import STATISTICS, Statistic
    from ottava.record.amaxes import read_series
    from ottava.record.dumps import read_dump, save_batch
    from ottava.record.reader import Run
    from ottava.remedy.fallback import Fallback, by_fork, by_gradient
    from ottava.remedy.guard import SpikeGuard
    from ottava.watching.config import WatchConfig

_HOMES = MappingProxyType(
    {
        "ottava.diagnose.compare": ("compare",),
        "ottava.diagnose.diagnose": ("diagnose",),
        "ottava.diagnose.history": ("replay",),
        "ottava.diagnose.what_if": ("predict",),
        "ottava.interop.contents": ("read_scaling_state",),
        "ottava.measure.observer": ("Observation", "Slots", "observe"),
        "ottava.measure.statistics": ("STATISTICS", "Statistic"),
        "ottava.record.amaxes": ("read_series",),
        "ottava.record.dumps": ("read_dump", "save_batch"),
        "ottava.record.reader": ("Run",),
        "ottava.experiments.bisect": ("bisect",),
        "ottava.remedy.fallback": ("Fallback", "by_fork", "by_gradient"),
        "ottava.remedy.guard": ("SpikeGuard",),
        "ottava.watching.config": ("WatchConfig",),
    }
)

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


def __getattr__(name: str) -> Any:
    return first_use(__name__, _HOMES, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
