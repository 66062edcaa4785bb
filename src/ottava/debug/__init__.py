"""The debugger: measures every tensor where it is cast, finds which cast hurts the run, and helps to repair it."""

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ottava.first_use import first_use

if TYPE_CHECKING:  # for type checkers what _HOMES is for Python
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

_HOMES = MappingProxyType(
    {
        "ottava.debug.analysis.compare": ("compare",),
        "ottava.debug.analysis.diagnose": ("diagnose",),
        "ottava.debug.analysis.what_if": ("predict",),
        "ottava.debug.history": ("replay",),
        "ottava.debug.observer": ("Observation", "observe"),
        "ottava.debug.recording": ("read_series",),
        "ottava.debug.remedy.bisect": ("bisect",),
        "ottava.debug.remedy.fallback": ("Fallback", "by_fork", "by_gradient"),
        "ottava.debug.remedy.guard": ("SpikeGuard",),
        "ottava.debug.run.reader": ("Run",),
        "ottava.debug.slots": ("Slots",),
        "ottava.debug.state_file": ("read_scaling_state",),
        "ottava.debug.statistics": ("STATISTICS", "Statistic"),
        "ottava.debug.watch.config": ("WatchConfig",),
        "ottava.debug.watch.dumps": ("read_dump", "save_batch"),
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
