"""From where to where a statistic is coloured: one entry in `SCALES` each, from calm (level 0) to alarming (level 1).

The ends do not decide anything; rules do (`diagnose`). They put statistics of different units onto one axis, so that a
heat map looks alike in every run, and the worst tensor of a look can be named. Signal to noise is read against what the
format gives a bell-shaped tensor (`limits.healthy_db`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Scale:
    """The two ends of a statistic's colours."""

    calm: float
    """Level 0; dB below the format's own figure where `below_format`."""
    alarm: float
    """Level 1."""
    log: bool = False
    """Levels follow the logarithm."""
    below_format: bool = False
    """Count down from what the format gives a bell-shaped tensor."""
    health: bool = False
    """Take part in naming the worst tensor of a look."""

    def levels(self, values: Any, floor: Any) -> Values:
        """Levels, below 0 and above 1 too; NaN stays.

        Args:
            values: numbers of the statistic.
            floor: what the format of each gives a bell-shaped tensor, dB.

        Example:
            >>> SCALES["row_sqnr_p50_db"].levels([31.5, 15.5], 31.5).tolist()
            [0.0, 1.0]
        """
        values = np.asarray(values, dtype=np.float64)
        if self.below_format:
            values = floor - values
        calm, alarm = self.calm, self.alarm
        if self.log:
            with np.errstate(divide="ignore", invalid="ignore"):
                values = np.log10(values)
            calm, alarm = math.log10(calm), math.log10(alarm)
        return np.asarray((values - calm) / (alarm - calm))


_SQNR = Scale(0, 16, below_format=True)
SCALES: Mapping[str, Scale] = MappingProxyType(
    {
        "row_sqnr_p50_db": Scale(0, 16, below_format=True, health=True),
        "row_sqnr_p10_db": _SQNR,
        "row_sqnr_p1_db": _SQNR,
        "sqnr_db": Scale(0, 16, below_format=True, health=True),
        "underflow_pct": Scale(0.01, 30, log=True, health=True),
        "underflow_pct_numel": Scale(0.01, 30, log=True, health=True),
        "subnormal_pct": Scale(1, 90, log=True),
        "overflow_pct": Scale(1e-4, 1, log=True, health=True),
        "rows_below_15db_pct": Scale(0.1, 50, log=True),
        "mean_relative_error": Scale(0.05, 0.7, log=True),
        "cosine": Scale(0.999, 0.95),
        "kurtosis": Scale(30, 1e4, log=True),
        "outlier_ratio": Scale(10, 1e3, log=True),
        "block_spread_p50": Scale(3, 14),
        "block_spread_p99": Scale(6, 20),
        "scale_error_max": Scale(0, 4, health=True),
        "scale_error_min": Scale(-6, -16, health=True),
        "nonfinite": Scale(0.1, 10, log=True, health=True),
    }
)
"""Statistics without an entry have units of their own tensor (amax, mse): they are coloured from their least to their
largest number, in a colour that does not warn."""
