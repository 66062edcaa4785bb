"""Where FP8 hurts: statistics of every tensor at the door where it is cast."""

from ottava.debug.observer import Observation, observe
from ottava.debug.statistics import STATISTICS, Statistic

__all__ = ["STATISTICS", "Observation", "Statistic", "observe"]
