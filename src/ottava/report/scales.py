"""The colour scale of each statistic, from calm (level 0) to alarming (level 1): one entry in `SCALES` each.

The scales decide nothing; the rules of `diagnose` do. They put statistics of different units onto one axis, so that
heat maps of all runs look alike and each has a worst tensor. SQNR is measured from that of a bell-shaped tensor in the
format (`limits.healthy_db`).
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
    """Value at level 0; with `below_format`, dB below the SQNR of a bell-shaped tensor in the format."""
    alarm: float
    """Value at level 1."""
    log: bool = False
    """Whether levels follow the logarithm."""
    below_format: bool = False
    """Whether values are dB below the SQNR of a bell-shaped tensor in the format."""
    health: bool = False
    """Whether the statistic helps to find the worst tensor of a look."""

    def levels(self, values: Any, floor: Any) -> Values:
        """Levels, which may be below 0 or above 1; NaN stays NaN.

        Args:
            values: values of the statistic.
            floor: SQNR of a bell-shaped tensor in the format of each value, dB.

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
        "error_dead_pct": Scale(10, 90),
        "error_clipped_pct": Scale(1, 90, log=True),
        "error_scale_pct": Scale(20, 90),
        "blocks_dead_pct": Scale(10, 90),
        "blocks_clipped_pct": Scale(1, 90, log=True),
        "blocks_scale_pct": Scale(20, 90),
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
"""A statistic without an entry has the unit of its tensor (amax, mse). Its colours run from its smallest to its largest
value and do not warn."""
