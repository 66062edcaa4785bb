"""Watches a training run: settings, the schedule of looks, taps into modules and casts, sums and displays."""

from ottava.watching.config import WatchConfig
from ottava.watching.session import Watch, watch

__all__ = ["Watch", "WatchConfig", "watch"]
