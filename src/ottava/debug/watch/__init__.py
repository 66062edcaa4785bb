"""Watching a training run: what is looked at and when (`config`, `schedule`), how it is seen (`doors`, `modules`),
summed (`collector`), dumped (`dumps`) and shown (`sinks`)."""

from ottava.debug.watch.config import WatchConfig
from ottava.debug.watch.session import Watch, watch

__all__ = ["Watch", "WatchConfig", "watch"]
