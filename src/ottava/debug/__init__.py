"""The debugger's public names: measure every cast, find which one hurts the run, repair it."""

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ottava.base import first_use

if TYPE_CHECKING:  # for type checkers what _HOMES is for Python
    from ottava.diagnose.compare import compare as compare
    from ottava.diagnose.diagnose import diagnose as diagnose
    from ottava.diagnose.history import replay as replay
    from ottava.diagnose.what_if import predict as predict
    from ottava.experiments.bisect import bisect as bisect
    from ottava.measure.observer import Observation as Observation
    from ottava.measure.observer import observe as observe
    from ottava.measure.statistics import STATISTICS as STATISTICS
    from ottava.measure.statistics import Statistic as Statistic
    from ottava.record.amaxes import read_series as read_series
    from ottava.record.dumps import read_dump as read_dump
    from ottava.record.dumps import save_batch as save_batch
    from ottava.record.reader import Run as Run
    from ottava.remedy.fallback import Fallback as Fallback
    from ottava.remedy.fallback import by_fork as by_fork
    from ottava.remedy.fallback import by_gradient as by_gradient
    from ottava.remedy.guard import SpikeGuard as SpikeGuard
    from ottava.watching.config import WatchConfig as WatchConfig

_HOMES = MappingProxyType(
    {
        "ottava.diagnose.compare": ("compare",),
        "ottava.diagnose.diagnose": ("diagnose",),
        "ottava.diagnose.history": ("replay",),
        "ottava.diagnose.what_if": ("predict",),
        "ottava.measure.observer": ("Observation", "observe"),
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

__all__ = sorted(name for names in _HOMES.values() for name in names)


def __getattr__(name: str) -> Any:
    return first_use(__name__, _HOMES, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
