"""Watches a training run: settings (`config`), steps (`schedule`), taps (`doors`, `modules`), sums (`collector`), files
(`dumps`) and displays (`sinks`)."""

from ottava.debug.watch.config import WatchConfig
from ottava.debug.watch.session import Watch, watch

__all__ = ["Watch", "WatchConfig", "watch"]
