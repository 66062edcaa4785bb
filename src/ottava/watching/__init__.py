"""Watches a training run: settings, the schedule of looks, taps into modules and casts, sums and displays."""

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ottava.base.first_use import first_use

if TYPE_CHECKING:  # for type checkers what _HOMES is for Python
    from ottava.watching.config import WatchConfig
    from ottava.watching.session import Watch, watch

_HOMES = MappingProxyType(
    {"ottava.watching.config": ("WatchConfig",), "ottava.watching.session": ("Watch", "watch")},
)

__all__ = ["Watch", "WatchConfig", "watch"]


def __getattr__(name: str) -> Any:
    return first_use(__name__, _HOMES, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
