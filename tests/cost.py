"""A pytest plugin: a test that costs too much fails, unless it is marked `slow`. `./x test` stays a matter of minutes.

What counts is CPU time, of the test and of the processes that it waited for: a busy machine makes nobody fail.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

MARK_FROM, FAIL_FROM = 10, 60
"""Seconds of CPU time: where a test should be marked, and where one that is not fails. A busy or older machine needs
three times the CPU time of a quiet one."""


def cpu_seconds() -> float:
    """CPU time of this process, of its children that have ended, and of those that a warm interpreter forked."""
    import resource

    import warm

    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages) + warm.cpu_seconds()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Compare what a test cost with what it may."""
    exempt = sys.platform == "win32" or any(map(item.get_closest_marker, ("slow", "gpu")))
    begin = 0.0 if exempt else cpu_seconds()
    result = yield
    cost = 0.0 if exempt else cpu_seconds() - begin
    if cost > FAIL_FROM:
        pytest.fail(
            f"this test cost {cost:.0f} s of CPU time. Make it smaller, or share its processes and builds with other "
            f"tests; what still needs more than {MARK_FROM} s gets @pytest.mark.slow",
            pytrace=False,
        )
    return result
