"""Every scale belongs to a statistic, runs the way that statistic goes bad, and is monotone."""

import numpy as np
import pytest

from ottava.debug.report.scales import SCALES, format_floor
from ottava.debug.statistics import STATISTICS
from ottava.formats import FORMATS


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


def test_floor_is_what_a_bell_shaped_tensor_measures() -> None:
    """Facts: 31.5 dB in E4M3 and 25.55 in E5M2, measured; unknown formats have none."""
    assert format_floor("E4M3") == pytest.approx(31.5, abs=0.1)
    assert format_floor("E5M2") == pytest.approx(25.55, abs=0.1)
    assert all(np.isfinite(format_floor(name)) for name in FORMATS)
    assert np.isnan(format_floor("FP8"))
