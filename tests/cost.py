"""A pytest plugin: a test that costs too much fails, unless it is marked `slow`. `./x test` stays a matter of minutes.

What counts is CPU time, of the test and of the processes that it waited for: a busy machine makes nobody fail. After a
minute of tests the plugin prints the price of each folder and the dearest tests; `.pytest_cache/v/ottava/cpu_seconds`
keeps the price of every test.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

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


class Prices:
    """Sums the CPU time of each test. Workers of pytest-xdist measure, and their reports bring it here."""

    def __init__(self, config: pytest.Config) -> None:
        self.config, self.last, self.seconds = config, 0.0, Counter[str]()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self) -> None:
        self.last = cpu_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Iterator[None]:
        """Fixtures count with the test that asks for them first."""
        report: Any = yield
        report.cpu, self.last = (now := cpu_seconds()) - self.last, now
        return report

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] += getattr(report, "cpu", 0.0)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Folders, and the fifteen dearest tests."""
        if self.seconds.total() < 60:
            return
        folders: Counter[str] = Counter()
        for test, seconds in self.seconds.items():
            folders["/".join(test.split("::")[0].split("/")[:2])] += seconds
        terminalreporter.section(f"{self.seconds.total():.0f} s of CPU time")
        for name, seconds in (*folders.most_common(12), *self.seconds.most_common(15)):
            terminalreporter.write_line(f"{seconds:8.1f} s  {name}")
        if getattr(self.config, "cache", None) is not None:  # -p no:cacheprovider
            self.config.cache.set("ottava/cpu_seconds", dict(self.seconds.most_common()))


def pytest_configure(config: pytest.Config) -> None:
    if sys.platform != "win32":
        config.pluginmanager.register(Prices(config))
