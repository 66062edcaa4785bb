"""Every scale belongs to a statistic, runs the way that statistic goes bad, and is monotone."""

import numpy as np
import pytest

from ottava.measure.statistics import STATISTICS
from ottava.report.scales import SCALES


@pytest.mark.parametrize("name", SCALES)
def test_scale_goes_the_way_of_its_statistic(name: str) -> None:
    scale, worse = SCALES[name], STATISTICS[name].worse
    rising = scale.alarm > scale.calm
    assert worse == ("high" if rising != scale.below_format else "low")


@pytest.mark.parametrize("name", SCALES)
def test_levels_run_from_calm_to_alarm(name: str) -> None:
    scale, floor = SCALES[name], 31.5
    ends = np.array([scale.calm, scale.alarm])
    middle = np.sqrt(ends.prod()) if scale.log else ends.mean()
    values = np.array([ends[0], middle, ends[1]])
    levels = scale.levels(floor - values if scale.below_format else values, floor)
    assert levels == pytest.approx([0.0, 0.5, 1.0])
    assert np.isnan(scale.levels(np.nan, floor))
